package machinedeployment

import (
	"context"
	"errors"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// A statusReport writes the status of a deployment.
type statusReport struct {
	*ownedSets
	progress *progress
	nodes    *nodeTending
}

// report stores what this pass has seen, and the error that it met: then the spec
// does not count as observed, as perhaps no set has what changed in it. Only this,
// turnRollout and reportInvalid write status.
func (r *statusReport) report(ctx context.Context, err error) error {
	if r.sorted {
		r.countReplicas()
		r.reportAvailability()
		r.reportReplicaFailure()
		r.progress.reportProgress()
		if err == nil {
			r.deployment.Status.ObservedGeneration = r.deployment.Generation
		}
	}
	r.progress.reportError(errors.Join(r.nodes.summarizeErrors(), err))

	return r.storeStatus(ctx)
}

// countReplicas sums up what the sets report of themselves.
func (o *ownedSets) countReplicas() {
	s := &o.deployment.Status
	s.Replicas, s.ReadyReplicas, s.AvailableReplicas, s.PreservedFailedReplicas, s.UpdatedReplicas = 0, 0, 0, 0, 0
	s.FailedMachines, s.FailedMachineCount = nil, 0
	var wanted int32
	for _, set := range o.sets {
		wanted += set.Spec.Replicas
		s.Replicas += set.Status.Replicas
		s.ReadyReplicas += set.Status.ReadyReplicas
		s.AvailableReplicas += set.Status.AvailableReplicas
		s.PreservedFailedReplicas += set.Status.PreservedFailedReplicas
		// Another set controller lists all of them and does not count.
		s.FailedMachineCount += max(set.Status.FailedMachineCount, int32(len(set.Status.FailedMachines)))
		failed := slices.Clone(set.Status.FailedMachines)
		if set == o.latest {
			s.FailedMachines = append(failed, s.FailedMachines...)
		} else {
			s.FailedMachines = append(s.FailedMachines, failed...)
		}
	}
	s.FailedMachines = v1alpha1.FirstFailedMachines(s.FailedMachines)
	s.UnavailableReplicas = max(0, wanted-s.AvailableReplicas)
	if o.latest != nil {
		s.UpdatedReplicas = o.latest.Status.Replicas
	}
}

// isComplete reports whether all machines there are have the current template and can
// be worked with, in the number wished for.
func (o *ownedSets) isComplete() bool {
	if o.latest == nil || o.latest.Status.ObservedGeneration < o.latest.Generation {
		return false
	}
	o.countReplicas()
	s, desired := &o.deployment.Status, o.deployment.Spec.Replicas

	return s.UpdatedReplicas == desired && s.Replicas == desired && s.AvailableReplicas == desired &&
		o.latest.Spec.Replicas == desired && total(o.countsOfAll(o.old), replicasOf) == 0
}

func (r *statusReport) reportAvailability() {
	s := &r.deployment.Status
	least := max(0, r.deployment.Spec.Replicas-limitsOf(&r.deployment.Spec).unavailable-s.PreservedFailedReplicas)
	status, reason, message := corev1.ConditionTrue, v1alpha1.ReasonMinimumReplicasAvailable, v1alpha1.MessageMinimumReplicasAvailable
	if s.AvailableReplicas < least {
		status, reason = corev1.ConditionFalse, v1alpha1.ReasonMinimumReplicasUnavailable
		message = "Deployment does not have minimum availability."
	}
	current := conditionOf(s, v1alpha1.MachineDeploymentAvailable)
	if current == nil || current.Status != status || current.Reason != reason {
		r.setCondition(v1alpha1.MachineDeploymentAvailable, status, reason, message)
	}
}

// failureOf returns the condition which says that a set cannot create or delete
// machines; nil when it can.
func failureOf(set *v1alpha1.MachineSet) *v1alpha1.MachineSetCondition {
	for i := range set.Status.Conditions {
		if c := &set.Status.Conditions[i]; c.Type == v1alpha1.MachineSetReplicaFailure && c.Status == corev1.ConditionTrue {
			return c
		}
	}

	return nil
}

// replicaFailure is that of the latest set, or else of an old one that still has machines;
// nil when there is none.
func (r *statusReport) replicaFailure() *v1alpha1.MachineSetCondition {
	var failure *v1alpha1.MachineSetCondition
	for _, set := range r.sets {
		if set != r.latest && set.Status.Replicas == 0 && r.countsOf(set).most() == 0 {
			continue // whatever is wrong with it holds nothing up
		}
		if c := failureOf(set); c != nil && (failure == nil || set == r.latest) {
			failure = c
		}
	}

	return failure
}

// reportReplicaFailure shows at the deployment that a set cannot create or delete machines.
func (r *statusReport) reportReplicaFailure() {
	failure := r.replicaFailure()
	s := &r.deployment.Status
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
		r.setCondition(v1alpha1.MachineDeploymentReplicaFailure, failure.Status, failure.Reason, failure.Message)
	}
}
