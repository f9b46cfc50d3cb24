package machinedeployment

import (
	"context"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// plan works out the next step of a rolling update: the replicas of the latest
// set and those of the old ones, which are in the order of their age. It changes
// either the latest set or old ones. There are never more than desired + surge
// machines, those that are being deleted included, and it deletes no available
// machine that is needed for desired - unavailable.
func plan(desired int32, l limits, latest counts, old []counts) (int32, []int32) {
	replicas := make([]int32, len(old))
	for i, c := range old {
		replicas[i] = c.Replicas
	}
	if next := planLatest(desired, l, latest, old); next != latest.Replicas {
		return next, replicas
	}
	least := desired - min(l.unavailable, desired)
	lacking := max(0, latest.Replicas-latest.sure())
	spare := latest.Replicas + total(old, replicasOf) - least - lacking
	// First what does not work anyway.
	for i, c := range old {
		n := max(0, min(spare, c.broken()))
		replicas[i] -= n
		spare -= n
	}
	// Then what does, as long as enough is left.
	sure := latest.sure()
	for i, c := range old {
		sure += min(c.sure(), replicas[i])
	}
	excess := min(spare, sure-least)
	for i := range old {
		n := max(0, min(excess, replicas[i]))
		replicas[i] -= n
		excess -= n
	}

	return latest.Replicas, replicas
}

// planLatest works out the replicas of the latest set.
func planLatest(desired int32, l limits, latest counts, old []counts) int32 {
	if latest.Replicas >= desired {
		return desired
	}
	room := desired + l.surge - latest.most() - total(old, counts.most)

	return latest.Replicas + max(0, min(room, desired-latest.Replicas))
}

// A rollout moves replicas to the latest set, as the strategy says.
type rollout struct {
	*ownedSets
	scaling   *scaling
	latestSet *latestSet
	progress  *progress
}

// rollOut takes the next step of the strategy.
func (r *rollout) rollOut(ctx context.Context) (steps.Next, error) {
	if r.deployment.Spec.Paused {
		return steps.Proceed, nil
	}
	switch r.deployment.Spec.Strategy.Type {
	case v1alpha1.RecreateMachineDeploymentStrategyType:
		return steps.Proceed, r.recreateMachines(ctx)
	case v1alpha1.InPlaceUpdateMachineDeploymentStrategyType:
		return steps.Proceed, r.holdInPlaceUpdate(ctx)
	default:
		return steps.Proceed, r.rollingUpdate(ctx)
	}
}

// rollingUpdate replaces old machines by new ones a few at a time.
func (r *rollout) rollingUpdate(ctx context.Context) error {
	desired, l := r.deployment.Spec.Replicas, limitsOf(&r.deployment.Spec)
	old := r.countsOfAll(r.old)
	if r.latest == nil {
		return r.startRollout(ctx, planLatest(desired, l, counts{}, old))
	}
	next, replicas := plan(desired, l, r.countsOf(r.latest), old)
	if err := r.scaling.resizeSet(ctx, r.latest, next); err != nil {
		return err
	}

	return r.resizeOld(ctx, replicas)
}

// resizeOld gives the old sets their replicas. Those of earlier revisions, which
// have none, are left in peace.
func (r *rollout) resizeOld(ctx context.Context, replicas []int32) error {
	for i, set := range r.old {
		if set.Spec.Replicas == 0 && replicas[i] == 0 {
			continue
		}
		if err := r.scaling.resizeSet(ctx, set, replicas[i]); err != nil {
			return err
		}
	}

	return nil
}

// startRollout makes the first machines of the current template, if it may.
func (r *rollout) startRollout(ctx context.Context, replicas int32) error {
	if r.deployment.Labels[v1alpha1.LabelKeyFreeze] == v1alpha1.LabelValueTrue {
		r.progress.fault = "The deployment is frozen: no new machine set is made until it is unfrozen"

		return nil
	}
	_, err := r.latestSet.createLatestSet(ctx, replicas)

	return err
}

// recreateMachines deletes all old machines before it makes new ones.
func (r *rollout) recreateMachines(ctx context.Context) error {
	if err := r.resizeOld(ctx, make([]int32, len(r.old))); err != nil {
		return err
	}
	if total(r.countsOfAll(r.old), counts.most) > 0 {
		return nil // the end of the last one starts the next pass
	}
	if r.latest == nil {
		return r.startRollout(ctx, r.deployment.Spec.Replicas)
	}

	return r.scaling.resizeSet(ctx, r.latest, r.deployment.Spec.Replicas)
}
