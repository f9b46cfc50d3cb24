package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
)

// errDamaged means that machines or processes did not survive. With other errors that is
// unknown.
var errDamaged = errors.New("machines or processes did not survive; see the findings above")

// errUnbroken means that a run with --until-damage found none.
var errUnbroken = errors.New("no machine was doubled or leaked")

// A tally holds the results of the run on one bus. It is safe for concurrent use.
type tally struct {
	bus   string
	asked int // lifecycles
	each  int // of each kind

	mu      sync.Mutex
	kinds   []string // chosen kinds that can happen on this bus
	absent  []string // chosen kinds that cannot
	hit     map[string]int
	missed  map[string]int
	found   []finding
	crashes []string

	figures
}

func newTally(bus string, asked, each int) *tally {
	return &tally{bus: bus, asked: asked, each: each, hit: map[string]int{}, missed: map[string]int{}}
}

// count counts a fault, and whether it had an effect.
func (t *tally) count(kind string, hit bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if hit {
		t.hit[kind]++
	} else {
		t.missed[kind]++
	}
}

// crash records that a process has exited unexpectedly.
func (t *tally) crash(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.crashes = append(t.crashes, err.Error())
}

// find adds findings that are not known yet.
func (t *tally) find(found ...finding) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, f := range found {
		if !slices.Contains(t.found, f) {
			t.found = append(t.found, f)
		}
	}
}

// broken reports whether instances were created that fencing and identities must prevent.
func (t *tally) broken() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.ContainsFunc(t.found, finding.broken)
}

// expect sets the kinds of faults that must happen, and those that cannot on this bus.
func (t *tally) expect(kinds, absent []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kinds, t.absent = kinds, absent
}

// hasHit reports whether a kind has happened often enough.
func (t *tally) hasHit(kind string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.hit[kind] >= t.each
}

// missing returns the kinds that have not happened often enough.
func (t *tally) missing() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(t.kinds), func(k string) bool { return t.hit[k] >= t.each })
}

// print prints the findings and figures of this bus.
func (t *tally) print(out io.Writer) {
	for _, f := range t.found {
		fmt.Fprintf(out, "%s: %s: %s\n", t.bus, f.damage, f.text)
	}
	for _, c := range t.crashes {
		fmt.Fprintf(out, "%s: crashed: %s\n", t.bus, strings.ReplaceAll(c, "\n", "\n  "))
	}
	fmt.Fprintf(out, "%s: lifecycles %d\n", t.bus, t.lifecycles)
	fmt.Fprintf(out, "%s: surplus of none, collected: %d\n", t.bus, t.surplus)
	for _, kind := range t.kinds {
		fmt.Fprintf(out, "%s: fault %-16s %d, missed %d\n", t.bus, kind, t.hit[kind], t.missed[kind])
	}
	if len(t.absent) > 0 {
		fmt.Fprintf(out, "%s: not on this bus: %s\n", t.bus, strings.Join(t.absent, ", "))
	}
}

// problems returns what is wrong with the run itself.
func (t *tally) problems() []error {
	var errs []error
	if len(t.crashes) > 0 {
		errs = append(errs, fmt.Errorf("bus %s: %d processes crashed: %w", t.bus, len(t.crashes), errDamaged))
	}
	if t.lifecycles < t.asked {
		errs = append(errs, fmt.Errorf("bus %s: %d of %d lifecycles: raise --limit", t.bus, t.lifecycles, t.asked))
	}
	if t.strange > 0 {
		errs = append(errs, fmt.Errorf("bus %s: the cloud created instances for %d machines, of %d, that the API server never stored",
			t.bus, t.strange, t.machines))
	}
	if missing := t.missing(); len(missing) > 0 {
		errs = append(errs, fmt.Errorf("bus %s: these faults had an effect less than %d times: %v", t.bus, t.each, missing))
	}
	return errs
}

// sought prints and returns the verdict on a run with --until-damage. Without damage it
// never returns errDamaged, whatever else went wrong.
func sought(out io.Writer, tallies []*tally, verdict error) error {
	if slices.ContainsFunc(tallies, (*tally).broken) {
		fmt.Fprintln(out, "found: instances were created that must not exist, as this run was to show")
		if errors.Is(verdict, errDamaged) {
			return verdict
		}
		return errors.Join(errDamaged, verdict)
	}
	fmt.Fprintln(out, "NOT found: no instance was created that must not exist, but this run was to show one")
	if verdict == nil {
		return errUnbroken
	}
	return fmt.Errorf("%w; besides: %s", errUnbroken, verdict.Error())
}

// verdict prints the results of all buses. It returns an error if anything is wrong, or if
// a wanted kind cannot happen on any of them.
func verdict(out io.Writer, wanted []string, tallies []*tally) error {
	var errs []error
	var everywhere []string
	sum := map[string]int{}
	for _, t := range tallies {
		t.print(out)
		errs = append(errs, t.problems()...)
		everywhere = append(everywhere, t.kinds...)
		for damage, n := range total(t.found) {
			sum[damage] += n
		}
	}
	nowhere := slices.DeleteFunc(slices.Clone(wanted), func(k string) bool { return slices.Contains(everywhere, k) })
	if len(nowhere) > 0 {
		errs = append(errs, fmt.Errorf("these faults cannot happen on any bus of this run: %v", nowhere))
	}
	if sum[lost]+sum[doubled]+sum[leaked]+sum[stuck] > 0 {
		errs = append(errs, errDamaged)
	}
	fmt.Fprintf(out, "lost %d doubled %d leaked %d stuck %d\n", sum[lost], sum[doubled], sum[leaked], sum[stuck])
	return errors.Join(errs...)
}
