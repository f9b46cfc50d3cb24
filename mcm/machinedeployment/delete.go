package machinedeployment

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// deleteSets deletes the sets of a deployment that is being deleted, and goes on
// when they are gone.
func (p *pass) deleteSets(ctx context.Context) (bool, error) {
	if controllerutil.ContainsFinalizer(p.deployment, metav1.FinalizerOrphanDependents) {
		return false, nil // the garbage collector lets them go; their events start the next pass
	}
	for _, set := range p.sets {
		if err := p.deleteSet(ctx, set); err != nil {
			return false, err
		}
	}

	return len(p.sets) == 0, nil
}

// deleteSet deletes a set that is still as it was read: one that the garbage
// collector, say, has made nobody's since then is not the deployment's to delete.
func (p *pass) deleteSet(ctx context.Context, set *v1alpha1.MachineSet) error {
	if !set.DeletionTimestamp.IsZero() {
		return nil
	}
	err := p.Control.Delete(ctx, set, client.Preconditions{UID: &set.UID, ResourceVersion: &set.ResourceVersion})
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete machine set %s/%s: %w", set.Namespace, set.Name, err)
	}

	return nil
}

// release lets the API server remove the deployment, once it is sure that there
// is no set which the cache does not show yet.
func (p *pass) release(ctx context.Context) (bool, error) {
	if !controllerutil.ContainsFinalizer(p.deployment, v1alpha1.FinalizerName) {
		return false, nil
	}
	sets, err := p.liveSets(ctx)
	if err != nil {
		return false, err
	}
	if len(sets) > 0 {
		p.lookAgain(conflictRetry)

		return false, nil
	}
	controllerutil.RemoveFinalizer(p.deployment, v1alpha1.FinalizerName)

	return false, p.patch(ctx)
}

// liveSets reads the deployment's sets from the API server.
func (p *pass) liveSets(ctx context.Context) ([]*v1alpha1.MachineSet, error) {
	list := &v1alpha1.MachineSetList{}
	if err := p.Live.List(ctx, list, client.InNamespace(p.deployment.Namespace)); err != nil {
		return nil, fmt.Errorf("list machine sets: %w", err)
	}
	var sets []*v1alpha1.MachineSet
	for i := range list.Items {
		if metav1.IsControlledBy(&list.Items[i], p.deployment) {
			sets = append(sets, &list.Items[i])
		}
	}

	return sets, nil
}
