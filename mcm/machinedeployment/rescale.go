package machinedeployment

import (
	"context"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// rescale brings a change of the deployment's replicas to its sets. The strategy
// goes on with the next pass.
func (p *pass) rescale(ctx context.Context) (bool, error) {
	active := p.active()
	changed := false
	for _, set := range active {
		noted, ok := replicasNoted(set, v1alpha1.AnnotationKeyDesiredReplicas)
		changed = changed || ok && noted != p.deployment.Spec.Replicas
	}
	switch {
	case changed && len(active) == 1:
		return false, p.resize(ctx, active[0], p.whole(active[0]))
	case changed:
		return false, p.divideAmong(ctx, active)
	case len(active) == 0 && p.fromZero() != nil:
		return false, p.resize(ctx, p.fromZero(), p.deployment.Spec.Replicas)
	default:
		return true, p.passOn(ctx, active)
	}
}

// whole is how many of the deployment's replicas its only active set gets: all
// that the rollout leaves room for.
func (p *pass) whole(set *v1alpha1.MachineSet) int32 {
	if set == p.latest && p.makesUp() && p.oldMachines() {
		return planLatest(p.deployment.Spec.Replicas, limitsOf(&p.deployment.Spec), p.countsOf(set), p.countsOfAll(p.old))
	}

	return p.deployment.Spec.Replicas
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
		if p.makesUp() && (len(active) > 1 || set != p.latest) {
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

// divideAmong changes the replicas of several sets in the middle of a rollout.
func (p *pass) divideAmong(ctx context.Context, active []*v1alpha1.MachineSet) error {
	desired := p.deployment.Spec.Replicas
	if p.latest != nil && p.unmarked(p.latest).Replicas == desired && p.unmarked(p.latest).sure() == desired {
		for _, set := range active {
			replicas := int32(0)
			if set == p.latest {
				replicas = desired
			}
			if err := p.resize(ctx, set, replicas); err != nil {
				return err
			}
		}

		return nil
	}
	l := limitsOf(&p.deployment.Spec)
	shares := make([]share, len(active))
	for i, set := range active {
		most, _ := replicasNoted(set, v1alpha1.AnnotationKeyMaxReplicas)
		c := p.unmarked(set)
		shares[i] = share{counts: c, Latest: set == p.latest, Max: most, Most: c.most()}
		if !p.makesUp() {
			// Machines that are on their way out hold nothing back.
			shares[i].Most = c.Replicas
		}
	}
	for i, replicas := range divide(desired, l, shares) {
		if err := p.resize(ctx, active[i], replicas); err != nil {
			return err
		}
	}

	return nil
}
