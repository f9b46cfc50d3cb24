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
	"github.com/machinebus/machinebus/mcm/steps"
)

// ownedSets are the sets of a deployment and their machines.
type ownedSets struct {
	*object
	live   client.Reader
	ledger *ledger

	sets     []*v1alpha1.MachineSet // oldest first
	latest   *v1alpha1.MachineSet   // the one of sets that has the current template; nil for none
	old      []*v1alpha1.MachineSet // the others
	sorted   bool                   // whether latest and old are known
	machines map[types.UID][]*v1alpha1.Machine
}

// claimSets finds the deployment's sets. It adopts those that match its selector
// and have no owner, and releases those of its own that no longer match.
func (o *ownedSets) claimSets(ctx context.Context) (steps.Next, error) {
	list := &v1alpha1.MachineSetList{}
	if err := o.control.List(ctx, list, client.InNamespace(o.deployment.Namespace), client.UnsafeDisableDeepCopy); err != nil {
		return steps.Wait, fmt.Errorf("list machine sets: %w", err)
	}
	for i := range list.Items {
		if err := o.claimSet(ctx, &list.Items[i]); err != nil {
			return steps.Wait, err
		}
	}
	slices.SortFunc(o.sets, byAge)

	return steps.Proceed, nil
}

// claimSet looks at one set of the cache, which is not ours to change.
func (o *ownedSets) claimSet(ctx context.Context, set *v1alpha1.MachineSet) error {
	deleting := !o.deployment.DeletionTimestamp.IsZero()
	matches := selects(o.deployment.Spec.Selector, set.Labels)
	ours := metav1.IsControlledBy(set, o.deployment)
	switch {
	case ours && (matches || deleting):
		o.sets = append(o.sets, set.DeepCopy())
	case !set.DeletionTimestamp.IsZero() || deleting:
	case ours:
		return o.releaseSet(ctx, set.DeepCopy())
	case matches && metav1.GetControllerOf(set) == nil:
		adopted := set.DeepCopy()
		if err := o.adoptSet(ctx, adopted); err != nil {
			return err
		}
		o.sets = append(o.sets, adopted)
	}

	return nil
}

func byAge(a, b *v1alpha1.MachineSet) int {
	return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
}

// adoptSet makes an orphan the deployment's, which must not be on its way out: our
// copy of it may be old.
func (o *ownedSets) adoptSet(ctx context.Context, set *v1alpha1.MachineSet) error {
	d := &v1alpha1.MachineDeployment{}
	if err := o.live.Get(ctx, client.ObjectKeyFromObject(o.deployment), d); err != nil {
		return fmt.Errorf("read deployment %s: %w", client.ObjectKeyFromObject(o.deployment), err)
	}
	if d.UID != o.deployment.UID || !d.DeletionTimestamp.IsZero() {
		return fmt.Errorf("adopt machine set %s: the deployment is gone or being deleted", set.Name)
	}
	before := set.DeepCopy()
	set.OwnerReferences = append(set.OwnerReferences, *o.controllerRef())
	if err := o.patchSet(ctx, set, before); err != nil {
		return err
	}
	o.log.Info("machine set adopted", "machineset", set.Name)

	return nil
}

func (o *ownedSets) controllerRef() *metav1.OwnerReference {
	return metav1.NewControllerRef(o.deployment, v1alpha1.SchemeGroupVersion.WithKind(v1alpha1.KindMachineDeployment))
}

// releaseSet removes the deployment as owner of a set that the selector does not select
// any more.
func (o *ownedSets) releaseSet(ctx context.Context, set *v1alpha1.MachineSet) error {
	before := set.DeepCopy()
	set.OwnerReferences = slices.DeleteFunc(set.OwnerReferences, func(ref metav1.OwnerReference) bool { return ref.UID == o.deployment.UID })
	if err := o.patchSet(ctx, set, before); err != nil {
		return err
	}
	o.ledger.drop(o.deployment.UID, set.UID)
	o.log.Info("machine set released", "machineset", set.Name)

	return nil
}

// patchSet stores what changed in a set, if no other writer has changed it since it was
// read, and notes it in the ledger.
func (o *ownedSets) patchSet(ctx context.Context, set, before *v1alpha1.MachineSet) error {
	err := o.control.Patch(ctx, set, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if err != nil {
		return fmt.Errorf("store machine set %s/%s: %w", set.Namespace, set.Name, err)
	}
	o.ledger.wrote(set)

	return nil
}

// findMachines finds the machines of all sets.
func (o *ownedSets) findMachines(ctx context.Context) (steps.Next, error) {
	machines := map[types.UID][]*v1alpha1.Machine{}
	for _, set := range o.sets {
		list := &v1alpha1.MachineList{}
		err := o.control.List(ctx, list, client.InNamespace(set.Namespace), client.MatchingFields{indexSet: string(set.UID)},
			client.UnsafeDisableDeepCopy)
		if err != nil {
			return steps.Wait, fmt.Errorf("list machines of set %s: %w", set.Name, err)
		}
		for i := range list.Items {
			machines[set.UID] = append(machines[set.UID], &list.Items[i])
		}
	}
	o.machines = machines

	return steps.Proceed, nil
}
