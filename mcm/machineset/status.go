package machineset

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// report stores what the pass saw. The set's metadata
// and spec are as stored: no step leaves changes of them behind.
func (p *pass) report(ctx context.Context) (steps.Next, error) {
	status := statusOf(p.set, p.machines, p.now)
	status.Conditions = withFailure(status.Conditions, p.failure, p.now)

	return steps.Proceed, p.storeStatus(ctx, status)
}

// storeStatus stores a status, if it says something new.
func (p *pass) storeStatus(ctx context.Context, status v1alpha1.MachineSetStatus) error {
	if equality.Semantic.DeepEqual(timeless(status), timeless(p.stored.Status)) {
		return nil
	}
	p.set.Status = status
	// The lock is for the conditions, a list that the freeze is written to as well.
	err := p.Client.Status().Patch(ctx, p.set, client.MergeFromWithOptions(p.stored, client.MergeFromWithOptimisticLock{}))
	if err != nil {
		return fmt.Errorf("store status of machine set %s/%s: %w", p.set.Namespace, p.set.Name, err)
	}
	p.take(p.set)

	return nil
}

// timeless returns a status without the times at which failed machines were last
// tried: that one was tried again is no news, and would be a write for each try.
func timeless(status v1alpha1.MachineSetStatus) v1alpha1.MachineSetStatus {
	status.FailedMachines = slices.Clone(status.FailedMachines)
	for i := range status.FailedMachines {
		status.FailedMachines[i].LastOperation.LastUpdateTime = metav1.Time{}
	}

	return status
}

// statusOf counts the set's machines. What it does not count it takes over.
func statusOf(set *v1alpha1.MachineSet, machines []*v1alpha1.Machine, now time.Time) v1alpha1.MachineSetStatus {
	status := *set.Status.DeepCopy()
	status.ObservedGeneration = set.Generation
	status.Replicas = int32(len(machines))
	status.FullyLabeledReplicas, status.ReadyReplicas, status.AvailableReplicas = 0, 0, 0
	status.PreservedFailedReplicas, status.FailedMachines = 0, nil
	status.AutoPreserveFailedMachineCount = nil
	if n := len(autoPreserved(set, machines, now)); n > 0 || set.Spec.AutoPreserveFailedMachineMax != nil {
		status.AutoPreserveFailedMachineCount = new(int32(n))
	}
	template := labels.SelectorFromSet(set.Spec.Template.Labels)
	for _, m := range machines {
		if template.Matches(labels.Set(m.Labels)) {
			status.FullyLabeledReplicas++
		}
		if m.Status.LastOperation.State == v1alpha1.MachineStateFailed {
			status.FailedMachines = append(status.FailedMachines, summary(m))
		}
		if !m.DeletionTimestamp.IsZero() {
			continue // whatever its phase still says
		}
		switch m.Status.CurrentStatus.Phase {
		case v1alpha1.MachineRunning:
			status.ReadyReplicas++
			status.AvailableReplicas++
		case v1alpha1.MachineAvailable:
			status.AvailableReplicas++
		case v1alpha1.MachineFailed:
			if preserved(m, now) {
				status.PreservedFailedReplicas++
			}
		}
	}
	slices.SortFunc(status.FailedMachines, func(a, b v1alpha1.MachineSummary) int { return strings.Compare(a.Name, b.Name) })
	status.FailedMachineCount = int32(len(status.FailedMachines))
	status.FailedMachines = v1alpha1.FirstFailedMachines(status.FailedMachines)

	return status
}

func summary(m *v1alpha1.Machine) v1alpha1.MachineSummary {
	s := v1alpha1.MachineSummary{Name: m.Name, ProviderID: m.Spec.ProviderID, LastOperation: m.Status.LastOperation}
	if ref := metav1.GetControllerOfNoCopy(m); ref != nil {
		s.OwnerRef = ref.Name
	}

	return s
}

// withFailure returns the conditions with the failure as ReplicaFailure, or
// without ReplicaFailure when there is none.
func withFailure(
	conditions []v1alpha1.MachineSetCondition, failure *v1alpha1.MachineSetCondition, now time.Time,
) []v1alpha1.MachineSetCondition {
	at := slices.IndexFunc(conditions, func(c v1alpha1.MachineSetCondition) bool {
		return c.Type == v1alpha1.MachineSetReplicaFailure
	})
	switch {
	case failure == nil && at < 0:
		return conditions
	case failure == nil:
		return slices.Delete(conditions, at, at+1)
	case at < 0:
		conditions, at = append(conditions, v1alpha1.MachineSetCondition{}), len(conditions)
	}
	since := conditions[at].LastTransitionTime
	if conditions[at].Status != failure.Status {
		since = metav1.NewTime(now)
	}
	conditions[at] = *failure
	conditions[at].LastTransitionTime = since

	return conditions
}
