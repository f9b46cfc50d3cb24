package machinedeployment

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// report stores what this pass has seen, and the error that it met: then the spec
// does not count as observed, as perhaps no set has what changed in it. Only this,
// turn and refuse write status.
func (p *pass) report(ctx context.Context, err error) error {
	if p.sorted {
		p.count()
		p.followAvailability()
		p.copyFailure()
		p.followProgress()
		if err == nil {
			p.deployment.Status.ObservedGeneration = p.deployment.Generation
		}
	}
	p.tellError(errors.Join(p.nodeError(), err))

	return p.storeStatus(ctx)
}

func (p *pass) storeStatus(ctx context.Context) error {
	if equality.Semantic.DeepEqual(p.deployment.Status, p.stored.Status) {
		return nil
	}
	// The lock keeps a pass over an old copy from undoing what a later one has said.
	err := p.Control.Status().Patch(ctx, p.deployment, client.MergeFromWithOptions(p.stored, client.MergeFromWithOptimisticLock{}))
	if err != nil {
		return fmt.Errorf("store status of deployment %s: %w", client.ObjectKeyFromObject(p.stored), err)
	}
	p.stored = p.deployment.DeepCopy()

	return nil
}

// count sums up what the sets report of themselves.
func (p *pass) count() {
	s := &p.deployment.Status
	s.Replicas, s.ReadyReplicas, s.AvailableReplicas, s.PreservedFailedReplicas, s.UpdatedReplicas = 0, 0, 0, 0, 0
	s.FailedMachines, s.FailedMachineCount = nil, 0
	var wanted int32
	for _, set := range p.sets {
		wanted += set.Spec.Replicas
		s.Replicas += set.Status.Replicas
		s.ReadyReplicas += set.Status.ReadyReplicas
		s.AvailableReplicas += set.Status.AvailableReplicas
		s.PreservedFailedReplicas += set.Status.PreservedFailedReplicas
		// Another set controller lists all of them and does not count.
		s.FailedMachineCount += max(set.Status.FailedMachineCount, int32(len(set.Status.FailedMachines)))
		failed := slices.Clone(set.Status.FailedMachines)
		if set == p.latest {
			s.FailedMachines = append(failed, s.FailedMachines...)
		} else {
			s.FailedMachines = append(s.FailedMachines, failed...)
		}
	}
	s.FailedMachines = v1alpha1.FirstFailedMachines(s.FailedMachines)
	s.UnavailableReplicas = max(0, wanted-s.AvailableReplicas)
	if p.latest != nil {
		s.UpdatedReplicas = p.latest.Status.Replicas
	}
}

// complete tells whether all machines there are have the current template and can
// be worked with, in the number wished for.
func (p *pass) complete() bool {
	if p.latest == nil || p.latest.Status.ObservedGeneration < p.latest.Generation {
		return false
	}
	p.count()
	s, desired := &p.deployment.Status, p.deployment.Spec.Replicas

	return s.UpdatedReplicas == desired && s.Replicas == desired && s.AvailableReplicas == desired &&
		p.latest.Spec.Replicas == desired && total(p.countsOfAll(p.old), replicasOf) == 0
}

func (p *pass) followAvailability() {
	s := &p.deployment.Status
	least := max(0, p.deployment.Spec.Replicas-limitsOf(&p.deployment.Spec).unavailable-s.PreservedFailedReplicas)
	status, reason, message := corev1.ConditionTrue, v1alpha1.ReasonMinimumReplicasAvailable, v1alpha1.MessageMinimumReplicasAvailable
	if s.AvailableReplicas < least {
		status, reason = corev1.ConditionFalse, v1alpha1.ReasonMinimumReplicasUnavailable
		message = "Deployment does not have minimum availability."
	}
	current := conditionOf(s, v1alpha1.MachineDeploymentAvailable)
	if current == nil || current.Status != status || current.Reason != reason {
		p.condition(v1alpha1.MachineDeploymentAvailable, status, reason, message)
	}
}

// failureOf returns the condition by which a set tells that it cannot create or delete
// machines; nil when it can.
func failureOf(set *v1alpha1.MachineSet) *v1alpha1.MachineSetCondition {
	for i := range set.Status.Conditions {
		if c := &set.Status.Conditions[i]; c.Type == v1alpha1.MachineSetReplicaFailure && c.Status == corev1.ConditionTrue {
			return c
		}
	}

	return nil
}

// failure is that of the latest set, or else of an old one that still has machines;
// nil when there is none.
func (p *pass) failure() *v1alpha1.MachineSetCondition {
	var failure *v1alpha1.MachineSetCondition
	for _, set := range p.sets {
		if set != p.latest && set.Status.Replicas == 0 && p.countsOf(set).most() == 0 {
			continue // whatever is wrong with it holds nothing up
		}
		if c := failureOf(set); c != nil && (failure == nil || set == p.latest) {
			failure = c
		}
	}

	return failure
}

// copyFailure shows at the deployment that a set cannot create or delete machines.
func (p *pass) copyFailure() {
	failure := p.failure()
	s := &p.deployment.Status
	current := conditionOf(s, v1alpha1.MachineDeploymentReplicaFailure)
	switch {
	case failure == nil && current != nil:
		var kept []v1alpha1.MachineDeploymentCondition
		for _, c := range s.Conditions {
			if c.Type != v1alpha1.MachineDeploymentReplicaFailure {
				kept = append(kept, c)
			}
		}
		s.Conditions = kept
	case failure != nil && (current == nil || current.Reason != failure.Reason || current.Message != failure.Message):
		p.condition(v1alpha1.MachineDeploymentReplicaFailure, failure.Status, failure.Reason, failure.Message)
	}
}
