package machineset

import (
	"context"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// cachePatience is how long passes wait for the cache to show what was done.
// Afterwards the API server is asked.
const cachePatience = 5 * time.Second

// A ledger remembers what was done for each set and is not yet seen in the cache.
// It saves requests: a pass over a cache that lags behind would read everything
// from the API server to find nothing to do. Correctness does not depend on it. The
// zero ledger is empty; it is safe for concurrent use.
type ledger struct {
	mu   sync.Mutex
	owed map[types.NamespacedName]*debt
}

// A debt is what the cache is to show of one set's machines.
type debt struct {
	created, deleted map[types.UID]bool
	since            time.Time
}

func (l *ledger) of(set types.NamespacedName, now time.Time) *debt {
	if l.owed == nil {
		l.owed = map[types.NamespacedName]*debt{}
	}
	if l.owed[set] == nil {
		l.owed[set] = &debt{created: map[types.UID]bool{}, deleted: map[types.UID]bool{}}
	}
	l.owed[set].since = now

	return l.owed[set]
}

func (l *ledger) created(set types.NamespacedName, machine types.UID, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.of(set, now).created[machine] = true
}

func (l *ledger) deleted(set types.NamespacedName, machine types.UID, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.of(set, now).deleted[machine] = true
}

func (l *ledger) forget(set types.NamespacedName) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.owed, set)
}

// settle strikes out what the cached machines show, and returns how long to wait
// for the rest; 0 when the cache has caught up or was waited for long enough.
func (l *ledger) settle(set types.NamespacedName, cached []*v1alpha1.Machine, now time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	d := l.owed[set]
	if d == nil {
		return 0
	}
	there := map[types.UID]bool{}
	for _, m := range cached {
		delete(d.created, m.UID)
		if m.DeletionTimestamp.IsZero() {
			there[m.UID] = true
		}
	}
	for uid := range d.deleted {
		if !there[uid] {
			delete(d.deleted, uid)
		}
	}
	left := cachePatience - now.Sub(d.since)
	if len(d.created)+len(d.deleted) == 0 || left <= 0 {
		delete(l.owed, set)

		return 0
	}

	return left
}

// awaitCache ends a pass over a cache that does not show yet what the last one
// did. What it lacks is an event.
func (p *pass) awaitCache(context.Context) (next, error) {
	cached := slices.Concat(p.machines, p.strays)
	if left := p.ledger.settle(client.ObjectKeyFromObject(p.set), cached, p.now); left > 0 {
		p.log.V(1).Info("the cache lags behind", "waiting", left)

		return again(left), nil
	}

	return proceed, nil
}
