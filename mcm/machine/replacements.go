package machine

import (
	"context"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// replacements knows which machines were just made Failed for being unhealthy, and
// which ones wait until they may be. It is safe for concurrent use; its zero value
// knows of none.
type replacements struct {
	mu      sync.Mutex
	taken   map[types.UID]taken
	waiting map[types.UID]waiting
}

// A taken counts as a machine that is being replaced until the cache shows
// something newer than the version that is to be overwritten: whether the write
// succeeded, failed, or has an unknown outcome.
type taken struct {
	pool    pool
	name    types.NamespacedName
	version string
}

type waiting struct {
	pool pool
	name types.NamespacedName
}

// take lets m, as it is stored, be replaced if fewer than most others of its pool
// are; or else it returns the name of one that is. The cache needs indexReplaced.
func (r *replacements) take(
	ctx context.Context, cache client.Reader, own pool, m *v1alpha1.Machine, most int,
) (other string, free bool, err error) {
	r.mu.Lock() // also while the cache is read: the next caller must see both
	defer r.mu.Unlock()
	if err := r.dropSeenLocked(ctx, cache, own); err != nil {
		return "", false, err
	}
	list := &v1alpha1.MachineList{}
	err = cache.List(ctx, list, client.InNamespace(own.namespace), client.MatchingFields{indexReplaced: own.key()}, client.UnsafeDisableDeepCopy)
	if err != nil {
		return "", false, err
	}
	if other, free = r.roomLocked(own, m.UID, list.Items, most); free {
		if r.taken == nil {
			r.taken = map[types.UID]taken{}
		}
		r.taken[m.UID] = taken{own, client.ObjectKeyFromObject(m), m.ResourceVersion}
	}

	return other, free, nil
}

// confirm is the same with what was read from the API server meanwhile. Without room
// m is not taken any more.
func (r *replacements) confirm(own pool, m types.UID, machines []v1alpha1.Machine, most int) (other string, free bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if other, free = r.roomLocked(own, m, machines, most); !free {
		delete(r.taken, m)
	}

	return other, free
}

// roomLocked counts the others of a pool that are being replaced; r.mu is held.
func (r *replacements) roomLocked(own pool, m types.UID, machines []v1alpha1.Machine, most int) (other string, free bool) {
	others := map[types.UID]string{}
	for i := range machines {
		if p, ok := poolOf(&machines[i]); ok && p == own && replaced(&machines[i]) {
			others[machines[i].UID] = machines[i].Name
		}
	}
	for uid, t := range r.taken {
		if t.pool == own {
			others[uid] = t.name.Name
		}
	}
	delete(others, m)
	for _, name := range others {
		if other == "" || name < other { // the same one as long as possible
			other = name
		}
	}

	return other, len(others) < most
}

// dropSeenLocked forgets what the cache shows by now; r.mu is held.
func (r *replacements) dropSeenLocked(ctx context.Context, cache client.Reader, own pool) error {
	for uid, t := range r.taken {
		if t.pool != own {
			continue
		}
		m := &v1alpha1.Machine{}
		err := cache.Get(ctx, t.name, m, client.UnsafeDisableDeepCopy)
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		if apierrors.IsNotFound(err) || m.UID != uid || newer(m.ResourceVersion, t.version) {
			delete(r.taken, uid)
		}
	}

	return nil
}

func newer(version, than string) bool {
	order, err := resourceversion.CompareResourceVersion(version, than)

	return err != nil || order > 0
}

// release gives back what was taken and not written.
func (r *replacements) release(m types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.taken, m)
}

// wait notes that a machine waits, until leave.
func (r *replacements) wait(m *v1alpha1.Machine, own pool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.waiting == nil {
		r.waiting = map[types.UID]waiting{}
	}
	r.waiting[m.UID] = waiting{own, client.ObjectKeyFromObject(m)}
}

func (r *replacements) leave(m types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.waiting, m)
}

// forget drops a machine that is gone.
func (r *replacements) forget(m types.UID) {
	r.release(m)
	r.leave(m)
}

// waitingIn returns the machines of a pool that wait.
func (r *replacements) waitingIn(own pool) []types.NamespacedName {
	r.mu.Lock()
	defer r.mu.Unlock()
	var names []types.NamespacedName
	for _, w := range r.waiting {
		if w.pool == own {
			names = append(names, w.name)
		}
	}

	return names
}

// Collectors are the controller's metrics.
func (r *Reconciler) Collectors() []prometheus.Collector {
	return append(r.timings.collectors(), &r.replacements)
}

var waitingDesc = prometheus.NewDesc("mcm_machine_replacements_waiting",
	"Unknown machines whose health timeout is over and that stay until others of their machine deployment are replaced.",
	[]string{"namespace", "machine_deployment"}, nil)

// Describe is part of [prometheus.Collector], as is Collect.
func (r *replacements) Describe(ch chan<- *prometheus.Desc) { ch <- waitingDesc }

func (r *replacements) Collect(ch chan<- prometheus.Metric) {
	type labels struct{ namespace, deployment string }
	count := map[labels]int{}
	r.mu.Lock()
	for _, w := range r.waiting {
		count[labels{w.pool.namespace, w.pool.deployment}]++
	}
	r.mu.Unlock()
	for l, n := range count {
		ch <- prometheus.MustNewConstMetric(waitingDesc, prometheus.GaugeValue, float64(n), l.namespace, l.deployment)
	}
}
