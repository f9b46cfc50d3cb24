package machinedeployment

import (
	"context"
	"fmt"
	"maps"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// A ledger keeps what the cache of MachineSets must show before a plan may be
// made from it: the generation of every set at the start, and of each write since.
// Optimistic locks alone are not enough, because a plan for one set is made from
// all of them. It is safe for concurrent use.
type ledger struct {
	mu     sync.Mutex
	seeded bool
	// deployments holds the generations at the start; what this process has seen
	// since then, the cache does not go back behind.
	deployments map[types.UID]int64
	sets        map[types.UID]map[types.UID]entry // by deployment and set
}

type entry struct {
	name       string
	generation int64
}

// seed reads all objects once from the API server: the cache may be behind what an
// earlier leader has written.
func (l *ledger) seed(ctx context.Context, live client.Reader, namespace string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.seeded {
		return nil
	}
	list := &v1alpha1.MachineSetList{}
	if err := live.List(ctx, list, client.InNamespace(namespace)); err != nil {
		return fmt.Errorf("list machine sets: %w", err)
	}
	deployments := &v1alpha1.MachineDeploymentList{}
	if err := live.List(ctx, deployments, client.InNamespace(namespace)); err != nil {
		return fmt.Errorf("list machine deployments: %w", err)
	}
	for i := range list.Items {
		l.noteLocked(&list.Items[i])
	}
	l.deployments = map[types.UID]int64{}
	for i := range deployments.Items {
		l.deployments[deployments.Items[i].UID] = deployments.Items[i].Generation
	}
	l.seeded = true

	return nil
}

// isCurrent reports whether a cached deployment is no older than at the start.
func (l *ledger) isCurrent(d *v1alpha1.MachineDeployment) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if d.Generation < l.deployments[d.UID] {
		return false
	}
	delete(l.deployments, d.UID)

	return true
}

// wrote notes a set as the API server has it.
func (l *ledger) wrote(set *v1alpha1.MachineSet) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.noteLocked(set)
}

// noteLocked notes a set; l.mu is held.
func (l *ledger) noteLocked(set *v1alpha1.MachineSet) {
	owner := metav1.GetControllerOf(set)
	if owner == nil {
		return
	}
	if l.sets == nil {
		l.sets = map[types.UID]map[types.UID]entry{}
	}
	if l.sets[owner.UID] == nil {
		l.sets[owner.UID] = map[types.UID]entry{}
	}
	l.sets[owner.UID][set.UID] = entry{name: set.Name, generation: set.Generation}
}

// forget drops a set that is gone, or no longer the deployment's.
func (l *ledger) forget(set client.Object) {
	owner := metav1.GetControllerOf(set)
	if owner == nil {
		return
	}
	l.drop(owner.UID, set.GetUID())
}

func (l *ledger) drop(deployment, set types.UID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.sets[deployment], set)
	if len(l.sets[deployment]) == 0 {
		delete(l.sets, deployment)
	}
}

// missing returns what the cache does not show yet, and drops what it does.
func (l *ledger) missing(deployment types.UID, cached []*v1alpha1.MachineSet) map[types.UID]entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	missing := map[types.UID]entry{}
	maps.Copy(missing, l.sets[deployment])
	for _, set := range cached {
		if e, ok := missing[set.UID]; ok && set.Generation >= e.generation {
			delete(missing, set.UID)
			delete(l.sets[deployment], set.UID)
		}
	}
	if len(l.sets[deployment]) == 0 {
		delete(l.sets, deployment)
	}

	return missing
}

// awaitCache ends the pass while the cache is behind what is known of the
// deployment's sets: their events start the next one. A set that was
// removed before the cache saw it has no event, so the API server is asked, too.
func (o *ownedSets) awaitCache(ctx context.Context) (steps.Next, error) {
	behind := false
	for uid, e := range o.ledger.missing(o.deployment.UID, o.sets) {
		set := &v1alpha1.MachineSet{}
		err := o.live.Get(ctx, client.ObjectKey{Namespace: o.deployment.Namespace, Name: e.name}, set)
		if client.IgnoreNotFound(err) != nil {
			return steps.Wait, fmt.Errorf("read machine set %s: %w", e.name, err)
		}
		if err != nil || set.UID != uid || !metav1.IsControlledBy(set, o.deployment) {
			o.ledger.drop(o.deployment.UID, uid)

			continue
		}
		behind = true
	}
	if behind {
		o.LookAgain(steps.ConflictRetry)

		return steps.Wait, nil
	}

	return steps.Proceed, nil
}
