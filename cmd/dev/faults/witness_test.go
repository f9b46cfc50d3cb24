package main

import (
	"errors"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

var testTime = time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC)

// seenMachine is a Machine that is to go since some time.
func seenMachine(uid string, since time.Time) *v1alpha1.Machine {
	m := &v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{UID: types.UID(uid)}}
	if !since.IsZero() {
		m.DeletionTimestamp = &metav1.Time{Time: since}
	}
	return m
}

// witnessAt is a witness whose clock stands.
func witnessAt(at time.Time) *witness {
	w := newWitness()
	w.now = func() time.Time { return at }
	return w
}

func TestWitness(t *testing.T) {
	t.Parallel()
	at := testTime
	w := witnessAt(at.Add(10 * time.Second))
	for _, uid := range []string{"in use", "replaced"} {
		w.saw(seenMachine(uid, time.Time{}), false)
	}
	w.saw(seenMachine("to go", at), false)
	w.saw(seenMachine("to go", at), true)
	w.saw(seenMachine("replaced", at.Add(time.Second)), true)
	w.saw(seenMachine("taken away", time.Time{}), true)
	w.removed("by force")
	w.saw(seenMachine("by force", time.Time{}), true)
	there := map[types.UID]*v1alpha1.Machine{"in use": seenMachine("in use", time.Time{})}
	if err := w.caughtUp(there); err != nil {
		t.Errorf("all are known to be gone, but one that is not: %v", err)
	}
	if err := w.caughtUp(nil); err == nil {
		t.Error("a machine that is gone was never seen to go, and that is enough")
	}
	w.stop(errors.New("etcd has forgotten"))
	if err := w.caughtUp(there); err == nil {
		t.Error("the watch has ended, and what it has not shown does not count")
	}
	for uid, tc := range map[string]struct {
		reason string
		want   bool
	}{
		"in use":     {"no deletion was requested", false},
		"replaced":   {"it was to go only afterwards, for want of its instance", false},
		"taken away": {"its deletion was not requested", false},
		"to go":      {"its deletion was requested before", true},
		"unknown":    {"it belongs to no Machine", true},
	} {
		if got := w.allows(uid, at); got != tc.want {
			t.Errorf("%s: deleting its instance is allowed: %v; %s", uid, got, tc.reason)
		}
	}
	for after, want := range map[time.Duration]bool{10 * time.Second: false, 10*time.Second + 1: true} {
		if got := w.tooLate("to go", at.Add(after)); got != want {
			t.Errorf("%s after it was to go, and it was gone after 10s: too late: %v", after, got)
		}
	}
	if w.allows("by force", at) || !w.allows("by force", at.Add(10*time.Second)) {
		t.Error("its instance may go once it was removed by force, and not before")
	}
	if w.tooLate("in use", at.Add(time.Hour)) || w.tooLate("unknown", at) {
		t.Error("it is too late for what is not known to be gone")
	}
}

// What etcd has no more after it was restored has gone by force; what went since the
// backup is back.
func TestWitness_Restored(t *testing.T) {
	t.Parallel()
	at := testTime
	w := witnessAt(at)
	w.saw(seenMachine("stays", time.Time{}), false)
	w.saw(seenMachine("came since", time.Time{}), false)
	w.saw(seenMachine("went since", at.Add(-time.Second)), true)
	w.restored(map[types.UID]bool{"stays": true, "went since": true})
	later := at.Add(time.Minute)
	if w.allows("stays", later) || !w.allows("came since", later) || w.allows("came since", at.Add(-time.Second)) {
		t.Error("instances of what came since may go from now on, and no others")
	}
	if w.tooLate("went since", later) || !w.tooLate("came since", later) {
		t.Error("instances may be made for what is there, and for nothing else")
	}
	back := seenMachine("went since", time.Time{})
	back.ResourceVersion = "7"
	there := map[types.UID]*v1alpha1.Machine{"stays": seenMachine("stays", time.Time{}), "went since": back}
	if err := w.caughtUp(there); err == nil {
		t.Error("it was not seen as it is now, and that is enough")
	}
	w.saw(back, false)
	if err := w.caughtUp(there); err != nil {
		t.Errorf("all was seen as it is: %v", err)
	}
}

// TestLives counts machines that have been Running and are gone.
func TestLives(t *testing.T) {
	t.Parallel()
	w := witnessAt(testTime)
	for _, uid := range []string{"whole", "in use"} {
		m := seenMachine(uid, time.Time{})
		m.Status.CurrentStatus.Phase = v1alpha1.MachineRunning
		w.saw(m, false)
	}
	w.saw(seenMachine("whole", testTime), true) // Terminating by now
	w.saw(seenMachine("never ran", time.Time{}), false)
	w.saw(seenMachine("never ran", testTime), true)
	if got := w.lives(); got != 1 {
		t.Errorf("%d machines have lived, want one", got)
	}
	for uid, want := range map[string][2]bool{"whole": {true, true}, "never ran": {false, true}, "unknown": {false, false}} {
		if l, seen := w.lived(uid); l.ran != want[0] || seen != want[1] {
			t.Errorf("%s: ran: %v, seen: %v, want %v", uid, l.ran, seen, want)
		}
	}
}
