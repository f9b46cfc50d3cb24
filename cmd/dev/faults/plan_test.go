package main

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestPlan draws the same plan twice, and another one from another seed.
func TestPlan(t *testing.T) {
	t.Parallel()
	const longest = time.Minute
	draw := func(seed uint64) (events []event) {
		p := newPlan(seed, kindNames(), longest)
		for range 20 * len(faults) {
			events = append(events, p.next())
		}
		return events
	}
	one := draw(1)
	if diff := cmp.Diff(one, draw(1), cmp.AllowUnexported(event{})); diff != "" {
		t.Errorf("one seed gave two plans:\n%s", diff)
	}
	if cmp.Equal(one, draw(2), cmp.AllowUnexported(event{})) {
		t.Error("two seeds gave one plan")
	}
	var first []string
	short := 0
	for i, e := range one {
		if i < len(faults) {
			first = append(first, e.kind)
		}
		if e.length < time.Second || e.length > longest {
			t.Errorf("a fault lasts %s", e.length)
		}
		if e.length <= 4*time.Second {
			short++
		}
	}
	want := kindNames()
	slices.Sort(first)
	slices.Sort(want)
	if diff := cmp.Diff(want, first); diff != "" {
		t.Errorf("not every kind comes before any comes again:\n%s", diff)
	}
	if short < len(one)/2 || short == len(one) {
		t.Errorf("%d of %d are short", short, len(one))
	}
}

// TestKindsHere has a bus without NATS servers of its own, as the embedded one is.
func TestKindsHere(t *testing.T) {
	t.Parallel()
	one := []*target{{name: "one"}}
	w := &world{
		options: &options{kinds: []string{"delay", "kill-driver", "freeze-nats", "lose-nats", "cut-nats-nats"}},
		links:   map[string][]*target{"driver-nats": one}, driverSet: one,
	}
	here, absent := w.kindsHere()
	if diff := cmp.Diff([]string{"kill-driver", "delay"}, here); diff != "" {
		t.Errorf("kinds with something to hit:\n%s", diff)
	}
	if diff := cmp.Diff([]string{"freeze-nats", "lose-nats", "cut-nats-nats"}, absent); diff != "" {
		t.Errorf("chosen kinds with nothing to hit:\n%s", diff)
	}
	w.serverSet = one
	if _, absent = w.kindsHere(); len(absent) != 1 {
		t.Errorf("with servers, there is nothing to hit for %v", absent)
	}
}
