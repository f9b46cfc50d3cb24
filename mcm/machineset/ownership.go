package machineset

import (
	"context"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// indexController finds machines by the uid of the object that controls them; the
// empty string stands for none.
const indexController = "machineset.controller"

func controllerOf(o client.Object) []string {
	ref := metav1.GetControllerOfNoCopy(o)
	if ref == nil {
		return []string{""}
	}

	return []string{string(ref.UID)}
}

func owned(m, set client.Object) bool {
	ref := metav1.GetControllerOfNoCopy(m)

	return ref != nil && ref.UID == set.GetUID()
}

// findMachines finds the set's machines, and those it may adopt, in the cache.
func (p *pass) findMachines(ctx context.Context) (steps.Next, error) {
	var found []*v1alpha1.Machine
	for _, controller := range []string{string(p.set.UID), ""} {
		list := &v1alpha1.MachineList{}
		err := p.Client.List(ctx, list, client.InNamespace(p.set.Namespace),
			client.MatchingFields{indexController: controller}, client.UnsafeDisableDeepCopy)
		if err != nil {
			return steps.Wait, fmt.Errorf("list machines of set %s/%s: %w", p.set.Namespace, p.set.Name, err)
		}
		for i := range list.Items {
			found = append(found, &list.Items[i])
		}
	}
	p.sortMachines(found)

	return steps.Proceed, nil
}

// findMachinesLive replaces what the pass knows from the cache by what the API server
// says. It stops at a set that is no longer the same or wants nothing any more.
func (p *pass) findMachinesLive(ctx context.Context) (steps.Next, error) {
	set := &v1alpha1.MachineSet{}
	err := p.Live.Get(ctx, client.ObjectKeyFromObject(p.set), set)
	if client.IgnoreNotFound(err) != nil {
		return steps.Wait, fmt.Errorf("read machine set %s/%s: %w", p.set.Namespace, p.set.Name, err)
	}
	// One that is gone has no uid.
	if set.UID != p.set.UID || !set.DeletionTimestamp.IsZero() {
		return steps.Wait, nil // the event of its deletion is still to come
	}
	p.take(set)
	if n, err := p.validate(ctx); n.Stop || err != nil {
		return n, err
	}
	list := &v1alpha1.MachineList{}
	err = p.Live.List(ctx, list, client.InNamespace(set.Namespace), client.MatchingLabelsSelector{Selector: p.selector})
	if err != nil {
		return steps.Wait, fmt.Errorf("list machines of set %s/%s: %w", set.Namespace, set.Name, err)
	}
	found := make([]*v1alpha1.Machine, 0, len(list.Items))
	for i := range list.Items {
		found = append(found, &list.Items[i])
	}
	p.sortMachines(found)

	return steps.Proceed, nil
}

// sortMachines separates the set's machines from those it may adopt and those to let go.
// Without a selector all that it owns are its own.
func (p *pass) sortMachines(found []*v1alpha1.Machine) {
	p.machines, p.orphans, p.strays = nil, nil, nil
	for _, m := range found {
		matches := p.selector != nil && p.selector.Matches(labels.Set(m.Labels))
		switch {
		case owned(m, p.set) && (matches || p.selector == nil):
			p.machines = append(p.machines, m)
		case owned(m, p.set):
			p.strays = append(p.strays, m)
		case matches && metav1.GetControllerOfNoCopy(m) == nil && m.DeletionTimestamp.IsZero():
			p.orphans = append(p.orphans, m)
		}
	}
}

// releaseMachines gives up machines that the selector no longer matches: a user took
// them out of the set to look at them, or to keep them.
func (p *pass) releaseMachines(ctx context.Context) (steps.Next, error) {
	for _, m := range p.strays {
		if !m.DeletionTimestamp.IsZero() {
			continue
		}
		free := m.DeepCopy()
		free.OwnerReferences = slices.DeleteFunc(free.OwnerReferences, func(ref metav1.OwnerReference) bool {
			return ref.UID == p.set.UID
		})
		if err := p.patchMachine(ctx, free, m); err != nil {
			return steps.Wait, err
		}
		p.log.Info("released machine", "machine", m.Name)
	}

	return steps.Proceed, nil
}

// adopt takes machines that match and have no controller. It must only be
// called with what was read from the API server: a set that was deleted meanwhile
// must not take any.
func (p *pass) adopt(ctx context.Context) error {
	for _, m := range p.orphans {
		mine := m.DeepCopy()
		mine.OwnerReferences = append(mine.OwnerReferences, controllerRef(p.set))
		if err := p.patchMachine(ctx, mine, m); err != nil {
			return err
		}
		p.machines = append(p.machines, mine)
		p.log.Info("adopted machine", "machine", m.Name)
	}
	p.orphans = nil

	return nil
}

// patchMachine stores a machine's owner references, which a merge patch replaces
// as a whole, if no other writer has changed the machine.
func (p *pass) patchMachine(ctx context.Context, m, stored *v1alpha1.Machine) error {
	err := p.Client.Patch(ctx, m, client.MergeFromWithOptions(stored, client.MergeFromWithOptimisticLock{}))
	if err != nil {
		return fmt.Errorf("store owner of machine %s/%s: %w", m.Namespace, m.Name, err)
	}

	return nil
}

func controllerRef(set *v1alpha1.MachineSet) metav1.OwnerReference {
	return *metav1.NewControllerRef(set, v1alpha1.SchemeGroupVersion.WithKind(v1alpha1.KindMachineSet))
}
