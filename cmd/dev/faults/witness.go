package main

import (
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// A witness records the life of each Machine. It is needed because sets replace machines
// that have lost their instance, and orphans are collected, so that at the end only the
// cloud's log shows either. It is safe for concurrent use.
type witness struct {
	now func() time.Time

	mu   sync.Mutex
	seen map[string]life // by uid
	err  error           // why the watch has stopped
}

// A life is what is known about a Machine.
type life struct {
	ran bool
	// version is the last version seen.
	version string
	// forced means that it was removed by force, and has left its instance.
	forced bool
	// since is when its deletion was requested, in whole seconds; zero if it was not.
	since time.Time
	// gone is when the witness saw that it is gone, which is later than it was; zero until
	// then.
	gone time.Time
}

func newWitness() *witness { return &witness{now: time.Now, seen: map[string]life{}} }

// saw records one version of a Machine, the last one if it is gone.
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

// removed records that a Machine is removed by force from now on.
func (w *witness) removed(uid string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	l := w.seen[uid]
	l.forced, l.since = true, w.now().Truncate(time.Second)
	w.seen[uid] = l
}

// restored records which Machines exist after a restore of etcd. Machines created since
// the backup were removed by force. Machines deleted since are back; deleting their
// instances was right.
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

// stop records why the watch has stopped.
func (w *witness) stop(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err = err
}

// caughtUp returns an error if the witness has not seen the current version of a Machine,
// or the end of one that is gone.
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

// allows reports whether a Machine's instance may be deleted at a time: only after the
// deletion of the Machine was requested. Instances without a Machine may be deleted.
func (w *witness) allows(uid string, at time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	l, seen := w.seen[uid]
	return !seen || !l.since.IsZero() && !at.Before(l.since)
}

// tooLate reports whether a Machine was gone at a time. After that none of its instances
// may be created or still exist.
func (w *witness) tooLate(uid string, at time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	l := w.seen[uid]
	return !l.gone.IsZero() && at.After(l.gone)
}

// lived returns the life of a Machine, and whether it was seen at all.
func (w *witness) lived(uid string) (l life, seen bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	l, seen = w.seen[uid]
	return l, seen
}

// lives returns how many Machines were seen Running and later gone.
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
