package machinedeployment

import (
	"context"
	"slices"
	"strconv"

	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// scaling gives the sets their replicas.
type scaling struct{ *ownedSets }

// rescale brings a change of the deployment's replicas to its sets. The strategy
// goes on with the next pass.
func (s *scaling) rescale(ctx context.Context) (steps.Next, error) {
	active := s.activeSets()
	desired := s.deployment.Spec.Replicas
	changed, before := false, desired
	for _, set := range active {
		if noted, ok := replicasNoted(set, v1alpha1.AnnotationKeyDesiredReplicas); ok && noted != desired {
			changed, before = true, max(before, noted)
		}
	}
	switch {
	case changed:
		for i, replicas := range s.divideReplicas(active, before-desired) {
			if err := s.resizeSet(ctx, active[i], replicas); err != nil {
				return steps.Wait, err
			}
		}

		return steps.Wait, nil
	case len(active) == 0 && s.setToFillFromZero() != nil:
		return steps.Wait, s.resizeSet(ctx, s.setToFillFromZero(), s.deployment.Spec.Replicas)
	default:
		return steps.Proceed, s.forwardScaleTime(ctx, active)
	}
}

// divideReplicas works out what the active sets get of the deployment's replicas, of which
// there are to be so many fewer than before.
func (s *scaling) divideReplicas(active []*v1alpha1.MachineSet, fewer int32) []int32 {
	if len(active) == 1 {
		return []int32{s.replicasOfOnly(active[0], fewer)}
	}

	return s.divideAmong(active, fewer)
}

// replicasOfOnly is what the only active set gets: all that the rollout leaves room for.
func (s *scaling) replicasOfOnly(set *v1alpha1.MachineSet, fewer int32) int32 {
	desired, c := s.deployment.Spec.Replicas, s.countsWithoutMarked(set)
	switch {
	case !s.rolloutFillsUp() && fewer > 0:
		return min(desired, c.Replicas+max(0, set.Spec.Replicas-c.Replicas-fewer))
	case !s.rolloutFillsUp():
		return desired
	case set != s.latest:
		// What is lacking is the latest set's to have, though it may have nothing yet.
		return min(desired, c.Replicas)
	case s.hasOldMachines():
		return planLatest(desired, limitsOf(&s.deployment.Spec), c, s.countsOfAll(s.old))
	default:
		return desired
	}
}

// setToFillFromZero is the set that takes all replicas of a deployment that had none; nil
// when a rollout is to see to that.
func (s *scaling) setToFillFromZero() *v1alpha1.MachineSet {
	switch {
	case s.deployment.Spec.Replicas == 0 || len(s.sets) == 0:
		return nil
	case s.latest == nil && s.deployment.Spec.Paused:
		return s.sets[len(s.sets)-1]
	case s.latest == nil || s.deployment.Spec.Paused:
		return s.latest
	}
	noted, _ := replicasNoted(s.latest, v1alpha1.AnnotationKeyDesiredReplicas)
	if noted == s.deployment.Spec.Replicas || total(s.countsOfAll(s.old), counts.most) > 0 {
		return nil
	}

	return s.latest
}

// activeSets are the sets that are to have machines.
func (o *ownedSets) activeSets() []*v1alpha1.MachineSet {
	var active []*v1alpha1.MachineSet
	for _, set := range o.sets {
		if set.Spec.Replicas > 0 && set.DeletionTimestamp.IsZero() {
			active = append(active, set)
		}
	}

	return active
}

// forwardScaleTime notes on the sets when the cluster-autoscaler last changed the
// replicas, though their sum did not change. In the middle of a rollout the latest set
// replaces the machines that go.
func (s *scaling) forwardScaleTime(ctx context.Context, active []*v1alpha1.MachineSet) error {
	for _, set := range active {
		at, ok := s.deployment.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler]
		if !ok || set.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler] == at {
			continue
		}
		replicas := set.Spec.Replicas
		if s.rolloutFillsUp() && s.hasOldMachines() {
			replicas = s.countsWithoutMarked(set).Replicas
		}
		if err := s.resizeSet(ctx, set, replicas); err != nil {
			return err
		}
	}

	return nil
}

// rolloutFillsUp reports whether a rollout gives the latest set what it does not get now.
func (s *scaling) rolloutFillsUp() bool {
	return !s.deployment.Spec.Paused && s.deployment.Spec.Strategy.Type != v1alpha1.InPlaceUpdateMachineDeploymentStrategyType
}

// divideAmong is for several sets, in the middle of a rollout.
func (s *scaling) divideAmong(active []*v1alpha1.MachineSet, fewer int32) []int32 {
	desired := s.deployment.Spec.Replicas
	if s.latest != nil && s.countsWithoutMarked(s.latest).Replicas == desired && s.countsWithoutMarked(s.latest).sure() == desired {
		replicas := make([]int32, len(active))
		for i, set := range active {
			if set == s.latest {
				replicas[i] = desired
			}
		}

		return replicas
	}
	allowed := desired
	if desired > 0 {
		allowed += limitsOf(&s.deployment.Spec).surge
	}
	shares := make([]share, len(active))
	var wanted, left, most int32
	for i, set := range active {
		before, _ := replicasNoted(set, v1alpha1.AnnotationKeyMaxReplicas)
		c := s.countsWithoutMarked(set)
		shares[i] = share{counts: c, Grows: set == s.latest, Max: before}
		wanted, left, most = wanted+set.Spec.Replicas, left+c.Replicas, most+c.most()
	}
	room := allowed - most
	if !s.rolloutFillsUp() {
		// No rollout goes on from here: one set has to grow, and machines that are on
		// their way out delay nothing. Where fewer are wished for, only marked machines
		// beyond that number are replaced.
		if !slices.ContainsFunc(shares, func(s share) bool { return s.Grows }) {
			shares[len(shares)-1].Grows = true
		}
		room = allowed - left
		if fewer > 0 {
			room = min(room, wanted-left-fewer)
		}
	}

	return divide(desired, allowed, room, shares)
}

// resizeSet gives a set its replicas, and with them what it must know of the
// deployment's: in one write, so that it never deletes machines that were marked
// for a change of replicas which it has not seen.
func (s *scaling) resizeSet(ctx context.Context, set *v1alpha1.MachineSet, replicas int32) error {
	before := set.DeepCopy()
	s.noteReplicas(set, replicas)
	if equality.Semantic.DeepEqual(before, set) {
		return nil
	}
	if err := s.patchSet(ctx, set, before); err != nil {
		return err
	}
	switch had := before.Spec.Replicas; {
	case replicas > had:
		s.sayf(v1alpha1.EventScalingMachineSet, v1alpha1.EventFormatScaledUp, set.Name, replicas)
	case replicas < had:
		s.sayf(v1alpha1.EventScalingMachineSet, v1alpha1.EventFormatScaledDown, set.Name, replicas)
	}

	return nil
}

func (o *ownedSets) noteReplicas(set *v1alpha1.MachineSet, replicas int32) {
	set.Spec.Replicas = replicas
	if set.Annotations == nil {
		set.Annotations = map[string]string{}
	}
	desired := o.deployment.Spec.Replicas
	limits := limitsOf(&o.deployment.Spec)
	set.Annotations[v1alpha1.AnnotationKeyDesiredReplicas] = strconv.Itoa(int(desired))
	set.Annotations[v1alpha1.AnnotationKeyMaxReplicas] = strconv.Itoa(int(desired + limits.surge))
	if at, ok := o.deployment.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler]; ok {
		set.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler] = at
	}
}
