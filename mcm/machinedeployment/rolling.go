package machinedeployment

import (
	"context"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// counts are a set as a plan sees it.
type counts struct {
	Replicas    int32 // that it is told to have
	Active      int32 // machines that are not being deleted
	Available   int32 // of them
	Terminating int32 // machines that are being deleted
}

// most is how many machines the set may come to have before it is told again.
func (c counts) most() int32 { return max(c.Replicas, c.Active) + c.Terminating }

// sure is how many machines are still available once the set has deleted those
// that it has too many of. Which these are is the set's decision.
func (c counts) sure() int32 {
	return max(0, c.Available-max(0, c.Active-c.Replicas))
}

// broken is how many of the set's replicas are unavailable, whatever it has yet
// to delete.
func (c counts) broken() int32 { return max(0, c.Replicas-c.Available) }

func total(all []counts, of func(counts) int32) int32 {
	var sum int32
	for _, c := range all {
		sum += of(c)
	}

	return sum
}

func replicasOf(c counts) int32 { return c.Replicas }

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

// rollOut takes the next step of the strategy.
func (p *pass) rollOut(ctx context.Context) (bool, error) {
	if p.deployment.Spec.Paused {
		return true, nil
	}
	switch p.deployment.Spec.Strategy.Type {
	case v1alpha1.RecreateMachineDeploymentStrategyType:
		return true, p.recreate(ctx)
	case v1alpha1.InPlaceUpdateMachineDeploymentStrategyType:
		return true, p.inPlace(ctx)
	default:
		return true, p.roll(ctx)
	}
}

// roll replaces old machines by new ones a few at a time.
func (p *pass) roll(ctx context.Context) error {
	desired, l := p.deployment.Spec.Replicas, limitsOf(&p.deployment.Spec)
	old := p.countsOfAll(p.old)
	if p.latest == nil {
		return p.begin(ctx, planLatest(desired, l, counts{}, old))
	}
	next, replicas := plan(desired, l, p.countsOf(p.latest), old)
	if err := p.resize(ctx, p.latest, next); err != nil {
		return err
	}

	return p.resizeOld(ctx, replicas)
}

// resizeOld gives the old sets their replicas. Those of earlier revisions, which
// have none, are left in peace.
func (p *pass) resizeOld(ctx context.Context, replicas []int32) error {
	for i, set := range p.old {
		if set.Spec.Replicas == 0 && replicas[i] == 0 {
			continue
		}
		if err := p.resize(ctx, set, replicas[i]); err != nil {
			return err
		}
	}

	return nil
}

// begin makes the first machines of the current template, if it may.
func (p *pass) begin(ctx context.Context, replicas int32) error {
	if p.deployment.Labels[v1alpha1.LabelKeyFreeze] == v1alpha1.LabelValueTrue {
		p.fault = "The deployment is frozen: no new machine set is made until it is unfrozen"

		return nil
	}
	_, err := p.createLatest(ctx, replicas)

	return err
}
