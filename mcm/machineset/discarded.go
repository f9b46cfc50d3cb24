package machineset

import (
	"time"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// leaving reports whether the machine is on its way out. It does not count for its
// set any more.
func leaving(m *v1alpha1.Machine) bool {
	return !m.DeletionTimestamp.IsZero() || m.Status.CurrentStatus.Phase == v1alpha1.MachineTerminating
}

// discarded reports whether the machine goes whatever the number of replicas: it
// Failed, or the autoscaler chose it.
func discarded(set *v1alpha1.MachineSet, m *v1alpha1.Machine, now time.Time) bool {
	if m.Status.CurrentStatus.Phase == v1alpha1.MachineFailed && !kept(m, now) {
		return true
	}

	return chosen(set, m)
}

// kept reports whether a Failed machine is preserved, or is about to be because a user
// asked for it.
func kept(m *v1alpha1.Machine, now time.Time) bool {
	if m.Status.CurrentStatus.PreserveExpiryTime != nil {
		return preserved(m, now)
	}
	switch wishOf(m) {
	case v1alpha1.PreserveNow, v1alpha1.PreserveWhenFailed, v1alpha1.PreserveAuto:
		return true
	default:
		return false
	}
}

// chosen reports whether the autoscaler marked the machine no later than it last
// set the replicas. A machine marked later belongs to a number of replicas that
// has not reached the set yet: deleted now, it would be replaced.
func chosen(set *v1alpha1.MachineSet, m *v1alpha1.Machine) bool {
	if m.Annotations[v1alpha1.AnnotationKeyMachinePriority] != v1alpha1.MachinePriorityDelete {
		return false
	}
	marked, ok := markedAt(m)
	scaled, known := timeOf(set.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler])

	return ok && known && !marked.After(scaled)
}
