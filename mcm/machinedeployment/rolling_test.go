package machinedeployment

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// full is a set all of whose machines are available.
func full(n int32) counts { return counts{Replicas: n, Active: n, Available: n} }

func TestPlan(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason  string
		desired int32
		limits  limits
		latest  counts
		old     []counts
		next    int32
		rest    []int32
	}{
		"Surge": {
			"the latest set takes what the surge leaves", 4, limits{1, 1}, counts{}, []counts{full(4)}, 1, []int32{4},
		},
		"SurgeUsedUp": {
			"with no room above, an old one may go below", 4, limits{1, 1}, counts{Replicas: 1, Active: 1}, []counts{full(4)}, 1, []int32{3},
		},
		"NothingMayBeMissing": {
			"without unavailable ones, an old one goes only for a new one that works",
			4,
			limits{1, 0},
			counts{Replicas: 1, Active: 1},
			[]counts{full(4)},
			1,
			[]int32{4},
		},
		"OneForOne": {
			"a new one works", 4, limits{1, 0}, full(1), []counts{full(4)}, 1, []int32{3},
		},
		"NoSurge": {
			"without surge the old one goes first", 3, limits{0, 1}, counts{}, []counts{full(3)}, 0, []int32{2},
		},
		"Terminating": {
			"machines on their way out count until they are gone",
			3,
			limits{0, 1},
			counts{},
			[]counts{{Replicas: 2, Active: 2, Available: 2, Terminating: 1}},
			0,
			[]int32{2},
		},
		"NotYetDeleted": {
			"what a set has yet to delete is not counted on",
			4,
			limits{1, 1},
			full(1),
			[]counts{{Replicas: 3, Active: 4, Available: 4}},
			1,
			[]int32{2},
		},
		"UnhealthyFirst": {
			"broken machines go first, of whatever age their set is",
			4,
			limits{1, 1},
			counts{Replicas: 1, Active: 1},
			[]counts{full(2), {Replicas: 2, Active: 2, Available: 1}},
			1,
			[]int32{2, 1},
		},
		"DeletesTheBrokenOne": {
			"a set that deletes its broken machine keeps the one that works",
			3,
			limits{1, 1},
			full(1),
			[]counts{{Replicas: 1, Active: 2, Available: 1}, {Replicas: 1, Active: 1}},
			1,
			[]int32{1, 0},
		},
		"OldestFirst": {
			"sets shrink in the order of their age", 4, limits{2, 0}, full(2), []counts{full(2), full(2)}, 2, []int32{0, 2},
		},
		"TooManyNew": {
			"the deployment has shrunk", 2, limits{1, 1}, full(4), []counts{full(1)}, 2, []int32{1},
		},
		"Done": {
			"no old one is needed", 4, limits{1, 1}, full(4), []counts{full(1), {}}, 4, []int32{0, 0},
		},
		"StuckRollout": {
			"new ones that never work stop it", 4, limits{1, 1}, counts{Replicas: 2, Active: 2}, []counts{full(3)}, 2, []int32{3},
		},
		"Zero": {
			"nothing is wished for", 0, limits{1, 0}, counts{}, []counts{full(2)}, 0, []int32{0},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			next, rest := plan(tc.desired, tc.limits, tc.latest, tc.old)
			if diff := cmp.Diff(append([]int32{tc.next}, tc.rest...), append([]int32{next}, rest...)); diff != "" {
				t.Errorf("%s: latest and old replicas: -want, +got:\n%s", tc.reason, diff)
			}
		})
	}
}

// A fleet plays MachineSets and machines beside plan. Sets delete machines that
// do not work first, as real ones do.
type fleet struct {
	desired int32
	limits  limits
	sets    []counts // the latest first
	lost    int32    // machines that failed of those to stay, less those of them that came up since
	seen    []counts // an earlier state of the machines
}

func (f *fleet) String() string {
	return fmt.Sprintf("desired %d %+v sets %+v seen %+v", f.desired, f.limits, f.sets, f.seen)
}

// plan takes a step by what the caches show: all sets as they are, machines as
// they were.
func (f *fleet) plan() {
	view := make([]counts, len(f.sets))
	for i := range view {
		view[i] = f.seen[i]
		view[i].Replicas = f.sets[i].Replicas
	}
	next, old := plan(f.desired, f.limits, view[0], view[1:])
	f.sets[0].Replicas = next
	for i, n := range old {
		f.sets[i+1].Replicas = n
	}
}

// converge has a set make or delete one machine.
func (f *fleet) converge(i int) {
	switch s := &f.sets[i]; {
	case s.Active < s.Replicas:
		s.Active++
	case s.Active > s.Replicas:
		if s.Available == s.Active {
			s.Available--
		}
		s.Active--
		s.Terminating++
	}
}

func (f *fleet) join(i int) {
	if s := &f.sets[i]; s.Available < s.Active {
		if s.Available < s.Replicas {
			f.lost = max(0, f.lost-1)
		}
		s.Available++
	}
}

func (f *fleet) vanish(i int) {
	if s := &f.sets[i]; s.Terminating > 0 {
		s.Terminating--
	}
}

func (f *fleet) fail(i int) {
	if s := &f.sets[i]; s.Available > 0 {
		if s.Available <= s.Replicas {
			f.lost++
		}
		s.Available--
	}
}

// discard has a set delete a machine that does not work and may be replaced at
// once, while it is on its way out.
func (f *fleet) discard(i int) {
	if s := &f.sets[i]; s.Available < s.Active {
		s.Active--
		s.Terminating++
	}
}

func (f *fleet) observe() { f.seen = append([]counts(nil), f.sets...) }

func (f *fleet) done() bool {
	return f.sets[0] == full(f.desired) && total(f.sets[1:], counts.most) == 0
}

// settle lets everything happen in turn, and reports whether the rollout ends.
func (f *fleet) settle() bool {
	const rounds = 1000
	for range rounds {
		if f.done() {
			return true
		}
		f.observe()
		f.plan()
		for i := range f.sets {
			f.converge(i)
			f.join(i)
			f.vanish(i)
		}
	}

	return false
}

func drawFleet(t *rapid.T) *fleet {
	f := &fleet{
		desired: rapid.Int32Range(0, 12).Draw(t, "desired"),
		limits:  limits{rapid.Int32Range(0, 6).Draw(t, "surge"), rapid.Int32Range(0, 6).Draw(t, "unavailable")},
		sets:    []counts{{}},
	}
	if f.limits.surge == 0 && f.limits.unavailable == 0 {
		f.limits.unavailable = 1
	}
	f.limits.unavailable = min(f.limits.unavailable, f.desired)
	left := f.desired
	for range rapid.IntRange(0, 2).Draw(t, "old sets") {
		n := rapid.Int32Range(0, left).Draw(t, "replicas")
		f.sets = append(f.sets, full(n))
		left -= n
	}
	f.sets = append(f.sets, full(left))
	f.observe()

	return f
}

// TestPlan_Invariants plays rollouts in which everything happens in any order, and
// what a pass sees of machines may be long over.
func TestPlan_Invariants(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := drawFleet(t)
		least, most := f.desired-f.limits.unavailable, f.desired+f.limits.surge
		set := rapid.IntRange(0, len(f.sets)-1)
		t.Repeat(map[string]func(*rapid.T){
			"plan":     func(*rapid.T) { f.plan() },
			"observe":  func(*rapid.T) { f.observe() },
			"converge": func(t *rapid.T) { f.converge(set.Draw(t, "set")) },
			"join":     func(t *rapid.T) { f.join(set.Draw(t, "set")) },
			"vanish":   func(t *rapid.T) { f.vanish(set.Draw(t, "set")) },
			"": func(t *rapid.T) {
				if n := total(f.sets, func(c counts) int32 { return c.Available }); n < least {
					t.Fatalf("%d machines are available, want at least %d: %s", n, least, f)
				}
				if n := total(f.sets, counts.most); n > most {
					t.Fatalf("there may be %d machines, want at most %d: %s", n, most, f)
				}
			},
		})
		if !f.settle() {
			t.Fatalf("the rollout does not end: %s", f)
		}
	})
}

// TestPlan_Failures has machines fail, too: a rollout never adds to that, and ends
// once they have stopped failing.
func TestPlan_Failures(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := drawFleet(t)
		least := f.desired - f.limits.unavailable
		set := rapid.IntRange(0, len(f.sets)-1)
		t.Repeat(map[string]func(*rapid.T){
			"plan": func(t *rapid.T) {
				f.observe()
				before := f.sure()
				f.plan()
				if after := f.sure(); after < before && after < least {
					t.Fatalf("the plan leaves %d of %d available machines, want at least %d: %s", after, before, least, f)
				}
			},
			"converge": func(t *rapid.T) { f.converge(set.Draw(t, "set")) },
			"join":     func(t *rapid.T) { f.join(set.Draw(t, "set")) },
			"vanish":   func(t *rapid.T) { f.vanish(set.Draw(t, "set")) },
			"fail":     func(t *rapid.T) { f.fail(set.Draw(t, "set")) },
			"": func(t *rapid.T) {
				if n := f.sure(); n+f.lost < least {
					t.Fatalf("%d available machines stay and %d failed, want at least %d in sum: %s", n, f.lost, least, f)
				}
				if n, most := total(f.sets, counts.most), f.desired+f.limits.surge; n > most {
					t.Fatalf("there may be %d machines, want at most %d: %s", n, most, f)
				}
			},
		})
		if !f.settle() {
			t.Fatalf("the rollout does not end: %s", f)
		}
	})
}

// TestPlan_Replacements has sets replace machines that failed before these are
// gone: a rollout never adds to the machines that are too many, and ends.
func TestPlan_Replacements(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := drawFleet(t)
		most := func() int32 { return total(f.sets, counts.most) }
		set := rapid.IntRange(0, len(f.sets)-1)
		t.Repeat(map[string]func(*rapid.T){
			"plan": func(t *rapid.T) {
				f.observe()
				before := most()
				f.plan()
				if after := most(); after > before && after > f.desired+f.limits.surge {
					t.Fatalf("the plan takes %d machines to %d, want at most %d: %s", before, after, f.desired+f.limits.surge, f)
				}
			},
			"converge": func(t *rapid.T) { f.converge(set.Draw(t, "set")) },
			"join":     func(t *rapid.T) { f.join(set.Draw(t, "set")) },
			"vanish":   func(t *rapid.T) { f.vanish(set.Draw(t, "set")) },
			"fail":     func(t *rapid.T) { f.fail(set.Draw(t, "set")) },
			"discard":  func(t *rapid.T) { f.discard(set.Draw(t, "set")) },
		})
		if !f.settle() {
			t.Fatalf("the rollout does not end: %s", f)
		}
	})
}

// sure is how many machines are still available once all sets have deleted what
// they have too many of.
func (f *fleet) sure() int32 {
	return total(f.sets, func(c counts) int32 { return min(c.Available, c.Replicas) })
}
