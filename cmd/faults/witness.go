package main

import (
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// A witness sees what becomes of each Machine: a set replaces a machine whose instance
// was taken from it, and the collection of orphans removes what a machine has left
// behind, so that in the end nothing tells of either but the cloud's log. It is safe
// for concurrent use.
type witness struct {
	now func() time.Time

	mu   sync.Mutex
	seen map[string]life // by uid
}

// A life is what was seen of a Machine.
type life struct {
	ran bool
	// since is when it was to go, in whole seconds; zero while it was not.
	since time.Time
	// gone is when it was heard that it is no more, which is later than it was; zero
	// while it was not heard.
	gone time.Time
	// missed says that it went while nobody could look.
	missed bool
}

func newWitness() *witness { return &witness{now: time.Now, seen: map[string]life{}} }

// listed takes what a list shows. What it does not show has gone meanwhile.
func (w *witness) listed(machines []v1alpha1.Machine) {
	w.mu.Lock()
	defer w.mu.Unlock()
	there := map[string]bool{}
	for i := range machines {
		w.note(&machines[i])
		there[string(machines[i].UID)] = true
	}
	for uid, l := range w.seen {
		if !there[uid] && l.gone.IsZero() {
			l.gone, l.missed = w.now(), l.since.IsZero()
			w.seen[uid] = l
		}
	}
}

// saw takes what an event of a watch shows.
func (w *witness) saw(m *v1alpha1.Machine, gone bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.note(m)
	if gone {
		l := w.seen[string(m.UID)]
		l.gone = w.now()
		w.seen[string(m.UID)] = l
	}
}

// note notes what a Machine shows of itself. w.mu is held.
func (w *witness) note(m *v1alpha1.Machine) {
	l := w.seen[string(m.UID)]
	l.ran = l.ran || m.Status.CurrentStatus.Phase == v1alpha1.MachineRunning
	if t := m.DeletionTimestamp; t != nil {
		l.since = t.Time
	}
	w.seen[string(m.UID)] = l
}

// caughtUp returns an error while the witness has not heard of a Machine's end: after
// a restart of the API server it hears of it late, and would take for lost what was to
// go all along.
func (w *witness) caughtUp(machines map[types.UID]*v1alpha1.Machine) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for uid, l := range w.seen {
		if l.gone.IsZero() && machines[types.UID(uid)] == nil {
			return fmt.Errorf("the watch has not told yet that machine %s is gone", uid)
		}
	}
	return nil
}

// allows tells whether a Machine's instance might be deleted at some time: not before
// the Machine was to go, as far as anybody has seen.
func (w *witness) allows(uid string, at time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	l, seen := w.seen[uid]
	return !seen || l.missed || !l.since.IsZero() && !at.Before(l.since)
}

// tooLate tells whether a Machine was gone at some time: nothing of it may be made
// or there to be deleted any more.
func (w *witness) tooLate(uid string, at time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	l := w.seen[uid]
	return !l.gone.IsZero() && at.After(l.gone)
}

// lived returns what was seen of a Machine, and whether it was seen at all.
func (w *witness) lived(uid string) (l life, seen bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	l, seen = w.seen[uid]
	return l, seen
}

// lives is how many Machines were seen Running and then to be gone.
func (w *witness) lives() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, l := range w.seen {
		if l.ran && !l.gone.IsZero() {
			n++
		}
	}
	return n
}
