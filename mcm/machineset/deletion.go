package machineset

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// addFinalizer keeps the set until its machines are gone.
func (p *pass) addFinalizer(ctx context.Context) (steps.Next, error) {
	if !controllerutil.AddFinalizer(p.set, v1alpha1.FinalizerName) {
		return steps.Proceed, nil
	}

	return steps.Proceed, p.patch(ctx)
}

// spareMachines lets go of a set whose machines are to outlive it
// (kubectl delete --cascade=orphan): the garbage collector frees them.
func (p *pass) spareMachines(ctx context.Context) (steps.Next, error) {
	if !controllerutil.ContainsFinalizer(p.set, v1alpha1.FinalizerName) {
		return steps.Wait, nil
	}
	if !controllerutil.ContainsFinalizer(p.set, metav1.FinalizerOrphanDependents) {
		return steps.Proceed, nil
	}
	controllerutil.RemoveFinalizer(p.set, v1alpha1.FinalizerName)

	return steps.Wait, p.patch(ctx)
}

// readSelector is all that a set on its way out is looked at for. A selector that
// does not even match the template says nothing about machines that were taken out:
// then all are the set's.
func (p *pass) readSelector(context.Context) (steps.Next, error) {
	selector, err := metav1.LabelSelectorAsSelector(p.set.Spec.Selector)
	if err == nil && selector.Matches(labels.Set(p.set.Spec.Template.Labels)) {
		p.selector = selector
	}

	return steps.Proceed, nil
}

// deleteMachines deletes all machines of a set that is being deleted.
func (p *pass) deleteMachines(ctx context.Context) (steps.Next, error) {
	if len(p.machines) == 0 {
		// The cache may not know them yet.
		if err := p.listLeft(ctx); err != nil {
			return steps.Wait, err
		}
	}
	var left []*v1alpha1.Machine
	for _, m := range p.machines {
		if m.DeletionTimestamp.IsZero() {
			left = append(left, m)
		}
	}
	p.delete(ctx, left)

	return steps.Proceed, nil
}

// listLeft reads from the API server what machines of the set there are. Those
// that never matched the selector are left to the garbage collector.
func (p *pass) listLeft(ctx context.Context) error {
	selector, err := metav1.LabelSelectorAsSelector(p.set.Spec.Selector)
	if err != nil {
		return nil //nolint:nilerr // with a broken selector the garbage collector deletes the rest
	}
	list := &v1alpha1.MachineList{}
	err = p.Live.List(ctx, list, client.InNamespace(p.set.Namespace), client.MatchingLabelsSelector{Selector: selector})
	if err != nil {
		return fmt.Errorf("list machines of set %s/%s: %w", p.set.Namespace, p.set.Name, err)
	}
	for i := range list.Items {
		if owned(&list.Items[i], p.set) {
			p.machines = append(p.machines, &list.Items[i])
		}
	}

	return nil
}

// removeFinalizer lets the API server remove a set that has no machines left. The
// event of each one that goes starts another pass.
func (p *pass) removeFinalizer(ctx context.Context) (steps.Next, error) {
	if len(p.machines) > 0 {
		return steps.Proceed, nil
	}
	controllerutil.RemoveFinalizer(p.set, v1alpha1.FinalizerName)

	return steps.Wait, p.patch(ctx)
}
