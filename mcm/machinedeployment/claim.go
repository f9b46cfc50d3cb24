package machinedeployment

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// claimSets finds the deployment's sets. It adopts those that match its selector
// and are nobody's, and releases those of its own that no longer match.
func (p *pass) claimSets(ctx context.Context) (bool, error) {
	list := &v1alpha1.MachineSetList{}
	if err := p.Control.List(ctx, list, client.InNamespace(p.deployment.Namespace), client.UnsafeDisableDeepCopy); err != nil {
		return false, fmt.Errorf("list machine sets: %w", err)
	}
	for i := range list.Items {
		if err := p.claim(ctx, &list.Items[i]); err != nil {
			return false, err
		}
	}
	slices.SortFunc(p.sets, byAge)

	return true, nil
}

// claim looks at one set of the cache, which is not ours to change.
func (p *pass) claim(ctx context.Context, set *v1alpha1.MachineSet) error {
	deleting := !p.deployment.DeletionTimestamp.IsZero()
	matches := selects(p.deployment.Spec.Selector, set.Labels)
	ours := metav1.IsControlledBy(set, p.deployment)
	switch {
	case ours && (matches || deleting):
		p.sets = append(p.sets, set.DeepCopy())
	case !set.DeletionTimestamp.IsZero() || deleting:
	case ours:
		return p.disown(ctx, set.DeepCopy())
	case matches && metav1.GetControllerOf(set) == nil:
		adopted := set.DeepCopy()
		if err := p.adopt(ctx, adopted); err != nil {
			return err
		}
		p.sets = append(p.sets, adopted)
	}

	return nil
}

func byAge(a, b *v1alpha1.MachineSet) int {
	return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
}

// adopt makes an orphan the deployment's, which must not be on its way out: our
// copy of it may be old.
func (p *pass) adopt(ctx context.Context, set *v1alpha1.MachineSet) error {
	d := &v1alpha1.MachineDeployment{}
	if err := p.Live.Get(ctx, client.ObjectKeyFromObject(p.deployment), d); err != nil {
		return fmt.Errorf("read deployment %s: %w", client.ObjectKeyFromObject(p.deployment), err)
	}
	if d.UID != p.deployment.UID || !d.DeletionTimestamp.IsZero() {
		return fmt.Errorf("adopt machine set %s: the deployment is gone or being deleted", set.Name)
	}
	before := set.DeepCopy()
	set.OwnerReferences = append(set.OwnerReferences, *p.controllerRef())
	if err := p.patchSet(ctx, set, before); err != nil {
		return err
	}
	p.log.Info("machine set adopted", "machineset", set.Name)

	return nil
}

func (p *pass) controllerRef() *metav1.OwnerReference {
	return metav1.NewControllerRef(p.deployment, v1alpha1.SchemeGroupVersion.WithKind(v1alpha1.KindMachineDeployment))
}

// disown makes a set nobody's that the selector does not select any more.
func (p *pass) disown(ctx context.Context, set *v1alpha1.MachineSet) error {
	before := set.DeepCopy()
	set.OwnerReferences = slices.DeleteFunc(set.OwnerReferences, func(ref metav1.OwnerReference) bool { return ref.UID == p.deployment.UID })
	if err := p.patchSet(ctx, set, before); err != nil {
		return err
	}
	p.ledger.drop(p.deployment.UID, set.UID)
	p.log.Info("machine set released", "machineset", set.Name)

	return nil
}

// patchSet stores what changed in a set, provided that nobody else has changed it
// since it was read, and notes it in the ledger.
func (p *pass) patchSet(ctx context.Context, set, before *v1alpha1.MachineSet) error {
	err := p.Control.Patch(ctx, set, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if err != nil {
		return fmt.Errorf("store machine set %s/%s: %w", set.Namespace, set.Name, err)
	}
	p.ledger.wrote(set)

	return nil
}

// findMachines finds the machines of all sets.
func (p *pass) findMachines(ctx context.Context) (bool, error) {
	machines := map[types.UID][]*v1alpha1.Machine{}
	for _, set := range p.sets {
		list := &v1alpha1.MachineList{}
		err := p.Control.List(ctx, list, client.InNamespace(set.Namespace), client.MatchingFields{indexSet: string(set.UID)},
			client.UnsafeDisableDeepCopy)
		if err != nil {
			return false, fmt.Errorf("list machines of set %s: %w", set.Name, err)
		}
		for i := range list.Items {
			machines[set.UID] = append(machines[set.UID], &list.Items[i])
		}
	}
	p.machines = machines

	return true, nil
}
