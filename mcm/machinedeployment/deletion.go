package machinedeployment

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// deleteSets deletes the sets of a deployment that is being deleted, and goes on
// when they are gone.
func (p *pass) deleteSets(ctx context.Context) (steps.Next, error) {
	if controllerutil.ContainsFinalizer(p.deployment, metav1.FinalizerOrphanDependents) {
		return steps.Wait, nil // the garbage collector lets them go; their events start the next pass
	}
	for _, set := range p.sets {
		if err := p.deleteSet(ctx, set); err != nil {
			return steps.Wait, err
		}
	}

	if len(p.sets) > 0 {
		return steps.Wait, nil
	}

	return steps.Proceed, nil
}

// deleteSet deletes a set that is still as it was read: a set that the garbage collector,
// say, has orphaned since then is not the deployment's to delete.
func (o *ownedSets) deleteSet(ctx context.Context, set *v1alpha1.MachineSet) error {
	if !set.DeletionTimestamp.IsZero() {
		return nil
	}
	err := o.control.Delete(ctx, set, client.Preconditions{UID: &set.UID, ResourceVersion: &set.ResourceVersion})
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete machine set %s/%s: %w", set.Namespace, set.Name, err)
	}

	return nil
}

// removeFinalizer lets the API server remove the deployment, if the API
// server itself shows no set of it.
func (p *pass) removeFinalizer(ctx context.Context) (steps.Next, error) {
	if !controllerutil.ContainsFinalizer(p.deployment, v1alpha1.FinalizerName) {
		return steps.Wait, nil
	}
	sets, err := p.liveSets(ctx)
	if err != nil {
		return steps.Wait, err
	}
	if len(sets) > 0 {
		p.LookAgain(steps.ConflictRetry)

		return steps.Wait, nil
	}
	controllerutil.RemoveFinalizer(p.deployment, v1alpha1.FinalizerName)

	return steps.Wait, p.patch(ctx)
}

// liveSets reads the deployment's sets from the API server.
func (o *ownedSets) liveSets(ctx context.Context) ([]*v1alpha1.MachineSet, error) {
	list := &v1alpha1.MachineSetList{}
	if err := o.live.List(ctx, list, client.InNamespace(o.deployment.Namespace)); err != nil {
		return nil, fmt.Errorf("list machine sets: %w", err)
	}
	var sets []*v1alpha1.MachineSet
	for i := range list.Items {
		if metav1.IsControlledBy(&list.Items[i], o.deployment) {
			sets = append(sets, &list.Items[i])
		}
	}

	return sets, nil
}
