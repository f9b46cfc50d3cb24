package machinedeployment

import (
	"cmp"
	"context"
	"slices"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// cleanHistory deletes the sets of the earliest revisions that a rollback could go
// to, beyond the number to keep. In the middle of a rollout it waits.
func (p *pass) cleanHistory(ctx context.Context) (bool, error) {
	limit := p.deployment.Spec.RevisionHistoryLimit
	if limit == nil || p.latest == nil || !p.deployment.Spec.Paused && !p.complete() {
		return true, nil
	}
	var spare []*v1alpha1.MachineSet
	for _, set := range p.old {
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
			len(p.machines[set.UID]) == 0
		if !idle {
			continue
		}
		if err := p.deleteSet(ctx, set); err != nil {
			return false, err
		}
		p.log.Info("machine set of an old revision deleted", "machineset", set.Name, "revision", revisionOf(set.Annotations))
	}

	return true, nil
}
