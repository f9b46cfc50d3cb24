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
// behind, so that in the end only the cloud's log shows either. It is safe for
// concurrent use.
type witness struct {
	now func() time.Time

	mu   sync.Mutex
	seen map[string]life // by uid
	err  error           // why it sees no more
}

// A life is what was seen of a Machine.
type life struct {
	ran bool
	// version is the last one that was seen.
	version string
	// forced: it was removed by force, and has left its instance behind.
	forced bool
	// since is when it was to go, in whole seconds; zero while it was not.
	since time.Time
	// gone is when the witness heard that it is no more, which is later than it was;
	// zero until then.
	gone time.Time
}

func newWitness() *witness { return &witness{now: time.Now, seen: map[string]life{}} }

// saw takes one version of a Machine, the last one if it is gone.
func (w *witness) saw(m *v1alpha1.Machine, gone bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	l := w.seen[string(m.UID)]
	l.ran = l.ran || m.Status.CurrentStatus.Phase == v1alpha1.MachineRunning
	l.version = m.ResourceVersion
	if t := m.DeletionTimestamp; t != nil {
		l.since = t.Time
	}
	if gone && l.gone.IsZero() {
		l.gone = w.now()
	}
	w.seen[string(m.UID)] = l
}

// removed notes that a Machine goes by force, from now on: what it leaves is collected.
func (w *witness) removed(uid string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	l := w.seen[uid]
	l.forced, l.since = true, w.now().Truncate(time.Second)
	w.seen[uid] = l
}

// restored notes which Machines there are after etcd was put back to what it was before.
// Those that came since have gone by force. Those that went are back; what was deleted of
// them, was rightly.
func (w *witness) restored(there map[types.UID]bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for uid, l := range w.seen {
		switch {
		case there[types.UID(uid)]:
			l.gone = time.Time{}
		case l.gone.IsZero():
			l.forced, l.since, l.gone = true, w.now().Truncate(time.Second), w.now()
		}
		w.seen[uid] = l
	}
}

// stop notes why the witness sees no more.
func (w *witness) stop(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err = err
}

// caughtUp returns an error while the witness has not seen the Machines as they are, or
// not heard of the end of one that is no more.
func (w *witness) caughtUp(machines map[types.UID]*v1alpha1.Machine) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return w.err
	}
	for uid, m := range machines {
		if seen := w.seen[string(uid)].version; seen != m.ResourceVersion {
			return fmt.Errorf("the watch of etcd has shown version %q of machine %s, which has %q", seen, uid, m.ResourceVersion)
		}
	}
	for uid, l := range w.seen {
		if l.gone.IsZero() && machines[types.UID(uid)] == nil {
			return fmt.Errorf("the watch of etcd has not shown yet that machine %s is gone", uid)
		}
	}
	return nil
}

// allows reports whether a Machine's instance may be deleted at some time: not before
// the Machine was to go. What belongs to no Machine may go.
func (w *witness) allows(uid string, at time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	l, seen := w.seen[uid]
	return !seen || !l.since.IsZero() && !at.Before(l.since)
}

// tooLate reports whether a Machine was gone at some time: nothing of it may be made
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
