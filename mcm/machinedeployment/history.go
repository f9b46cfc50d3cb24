package machinedeployment

import (
	"cmp"
	"context"
	"slices"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// deleteOldRevisions deletes the sets of the earliest revisions that a rollback could go
// to, beyond the number to keep. In the middle of a rollout it waits.
func (o *ownedSets) deleteOldRevisions(ctx context.Context) (steps.Next, error) {
	limit := o.deployment.Spec.RevisionHistoryLimit
	if limit == nil || o.latest == nil || !o.deployment.Spec.Paused && !o.isComplete() {
		return steps.Proceed, nil
	}
	var spare []*v1alpha1.MachineSet
	for _, set := range o.old {
		if set.DeletionTimestamp.IsZero() {
			spare = append(spare, set)
		}
	}
	// Not by age: an old set that was gone back to has a late revision.
	slices.SortStableFunc(spare, func(a, b *v1alpha1.MachineSet) int {
		return cmp.Compare(revisionOf(a.Annotations), revisionOf(b.Annotations))
	})
	for _, set := range spare[:max(0, len(spare)-int(*limit))] {
		idle := set.Spec.Replicas == 0 && set.Status.Replicas == 0 && set.Status.ObservedGeneration >= set.Generation &&
			len(o.machines[set.UID]) == 0
		if !idle {
			continue
		}
		if err := o.deleteSet(ctx, set); err != nil {
			return steps.Wait, err
		}
		o.log.Info("machine set of an old revision deleted", "machineset", set.Name, "revision", revisionOf(set.Annotations))
	}

	return steps.Proceed, nil
}
