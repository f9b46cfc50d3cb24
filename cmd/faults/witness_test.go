package main

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

func TestWitness(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC)
	machine := func(uid string, since time.Time) *v1alpha1.Machine {
		m := &v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{UID: types.UID(uid)}}
		if !since.IsZero() {
			m.DeletionTimestamp = &metav1.Time{Time: since}
		}
		return m
	}
	w := &witness{seen: map[string]going{}}
	for _, uid := range []string{"in use", "replaced", "missed"} {
		w.OnAdd(machine(uid, time.Time{}), true)
	}
	w.OnUpdate(nil, machine("to go", at))
	w.OnDelete(machine("to go", at))
	w.OnDelete(machine("replaced", at.Add(time.Second)))
	w.OnDelete(toolscache.DeletedFinalStateUnknown{Obj: machine("missed", time.Time{})})
	there := map[types.UID]*v1alpha1.Machine{"in use": machine("in use", time.Time{})}
	if err := w.caughtUp(there); err != nil {
		t.Errorf("all are known to be gone, but one that is not: %v", err)
	}
	if err := w.caughtUp(nil); err == nil {
		t.Error("a machine that is gone was never seen to go, and that is enough")
	}
	for uid, tc := range map[string]struct {
		reason string
		want   bool
	}{
		"in use":   {"nobody wanted it to go", false},
		"replaced": {"it was to go only afterwards, for want of its instance", false},
		"to go":    {"somebody has deleted it before", true},
		"missed":   {"nobody knows when it was to go", true},
		"unknown":  {"it came and went while nobody could look", true},
	} {
		if got := w.allows(uid, at); got != tc.want {
			t.Errorf("%s: deleting its instance is allowed: %v; %s", uid, got, tc.reason)
		}
	}
}
