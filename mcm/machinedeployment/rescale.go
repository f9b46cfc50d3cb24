package machinedeployment

import (
	"context"
	"slices"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// rescale brings a change of the deployment's replicas to its sets. The strategy
// goes on with the next pass.
func (p *pass) rescale(ctx context.Context) (bool, error) {
	active := p.active()
	desired := p.deployment.Spec.Replicas
	changed, before := false, desired
	for _, set := range active {
		if noted, ok := replicasNoted(set, v1alpha1.AnnotationKeyDesiredReplicas); ok && noted != desired {
			changed, before = true, max(before, noted)
		}
	}
	switch {
	case changed:
		for i, replicas := range p.parts(active, before-desired) {
			if err := p.resize(ctx, active[i], replicas); err != nil {
				return false, err
			}
		}

		return false, nil
	case len(active) == 0 && p.fromZero() != nil:
		return false, p.resize(ctx, p.fromZero(), p.deployment.Spec.Replicas)
	default:
		return true, p.passOn(ctx, active)
	}
}

// parts works out what the active sets get of the deployment's replicas, of which
// there are to be so many fewer than before.
func (p *pass) parts(active []*v1alpha1.MachineSet, fewer int32) []int32 {
	if len(active) == 1 {
		return []int32{p.whole(active[0], fewer)}
	}

	return p.divideAmong(active, fewer)
}

// whole is what the only active set gets: all that the rollout leaves room for.
func (p *pass) whole(set *v1alpha1.MachineSet, fewer int32) int32 {
	desired, c := p.deployment.Spec.Replicas, p.unmarked(set)
	switch {
	case !p.makesUp() && fewer > 0:
		return min(desired, c.Replicas+max(0, set.Spec.Replicas-c.Replicas-fewer))
	case !p.makesUp():
		return desired
	case set != p.latest:
		// What is lacking is the latest set's to have, though it may have nothing yet.
		return min(desired, c.Replicas)
	case p.oldMachines():
		return planLatest(desired, limitsOf(&p.deployment.Spec), c, p.countsOfAll(p.old))
	default:
		return desired
	}
}

// fromZero is the set that takes all replicas of a deployment that had none; nil
// when a rollout is to see to that.
func (p *pass) fromZero() *v1alpha1.MachineSet {
	switch {
	case p.deployment.Spec.Replicas == 0 || len(p.sets) == 0:
		return nil
	case p.latest == nil && p.deployment.Spec.Paused:
		return p.sets[len(p.sets)-1]
	case p.latest == nil || p.deployment.Spec.Paused:
		return p.latest
	}
	noted, _ := replicasNoted(p.latest, v1alpha1.AnnotationKeyDesiredReplicas)
	if noted == p.deployment.Spec.Replicas || total(p.countsOfAll(p.old), counts.most) > 0 {
		return nil
	}

	return p.latest
}

// active are the sets that are to have machines.
func (p *pass) active() []*v1alpha1.MachineSet {
	var active []*v1alpha1.MachineSet
	for _, set := range p.sets {
		if set.Spec.Replicas > 0 && set.DeletionTimestamp.IsZero() {
			active = append(active, set)
		}
	}

	return active
}

// passOn tells the sets when the cluster-autoscaler last changed the replicas,
// though they did not change in sum. In the middle of a rollout the machines that
// go are made up for by the latest set.
func (p *pass) passOn(ctx context.Context, active []*v1alpha1.MachineSet) error {
	for _, set := range active {
		at, ok := p.deployment.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler]
		if !ok || set.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler] == at {
			continue
		}
		replicas := set.Spec.Replicas
		if p.makesUp() && p.oldMachines() {
			replicas = p.unmarked(set).Replicas
		}
		if err := p.resize(ctx, set, replicas); err != nil {
			return err
		}
	}

	return nil
}

// makesUp tells whether a rollout gives the latest set what it does not get now.
func (p *pass) makesUp() bool {
	return !p.deployment.Spec.Paused && p.deployment.Spec.Strategy.Type != v1alpha1.InPlaceUpdateMachineDeploymentStrategyType
}

// divideAmong is for several sets, in the middle of a rollout.
func (p *pass) divideAmong(active []*v1alpha1.MachineSet, fewer int32) []int32 {
	desired := p.deployment.Spec.Replicas
	if p.latest != nil && p.unmarked(p.latest).Replicas == desired && p.unmarked(p.latest).sure() == desired {
		replicas := make([]int32, len(active))
		for i, set := range active {
			if set == p.latest {
				replicas[i] = desired
			}
		}

		return replicas
	}
	allowed := desired
	if desired > 0 {
		allowed += limitsOf(&p.deployment.Spec).surge
	}
	shares := make([]share, len(active))
	var told, left, most int32
	for i, set := range active {
		before, _ := replicasNoted(set, v1alpha1.AnnotationKeyMaxReplicas)
		c := p.unmarked(set)
		shares[i] = share{counts: c, Grows: set == p.latest, Max: before}
		told, left, most = told+set.Spec.Replicas, left+c.Replicas, most+c.most()
	}
	room := allowed - most
	if !p.makesUp() {
		// Nobody goes on from here: somebody has to have them, and machines that are
		// on their way out hold nothing back. Where fewer are wished for, only the
		// chosen ones beyond these are made up for.
		if !slices.ContainsFunc(shares, func(s share) bool { return s.Grows }) {
			shares[len(shares)-1].Grows = true
		}
		room = allowed - left
		if fewer > 0 {
			room = min(room, told-left-fewer)
		}
	}

	return divide(desired, allowed, room, shares)
}
