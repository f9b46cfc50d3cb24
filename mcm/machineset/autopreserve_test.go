package machineset_test

import (
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestAutoPreserve has machines of a set fail. The test plays the machine
// controller, which gives a chosen machine its time and takes it away again.
func TestAutoPreserve(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	set := r.set("a", 3)
	set.Spec.AutoPreserveFailedMachineMax = new(int32(1))
	r.create(t, set)
	r.settled(t, set, 3)
	fail := func(m *v1alpha1.Machine) { m.Status.CurrentStatus.Phase = v1alpha1.MachineFailed }
	first := r.machines(t)[0]
	changeStatus(t, r, first, fail)
	chosen := func(m *v1alpha1.Machine) bool {
		return slices.ContainsFunc(r.machines(t), func(other *v1alpha1.Machine) bool {
			return other.UID == m.UID && other.Annotations[v1alpha1.AnnotationKeyPreserve] == v1alpha1.PreserveAuto
		})
	}
	until(t, "the first one to fail is chosen", func() bool { return chosen(first) })
	r.event(t, set, "AutoPreserve", "Preserves failed machine "+first.Name)
	changeStatus(t, r, first, func(m *v1alpha1.Machine) {
		m.Status.CurrentStatus.PreserveExpiryTime = &metav1.Time{Time: time.Now().Add(time.Hour)}
	})
	second := r.machines(t)[1]
	changeStatus(t, r, second, fail)
	counted := func(count, preserved, ready int32) func() bool {
		return func() bool {
			status := r.get(t, set).Status
			n := status.AutoPreserveFailedMachineCount

			return n != nil && *n == count && status.PreservedFailedReplicas == preserved && status.ReadyReplicas == ready
		}
	}
	until(t, "there is no room for the second, which is replaced", counted(1, 1, 2))
	if there := names(r.machines(t)); !slices.Contains(there, first.Name) {
		t.Fatalf("machines are %q, and the preserved one is gone", there)
	}

	change(t, r, set, func(set *v1alpha1.MachineSet) { set.Spec.AutoPreserveFailedMachineMax = new(int32(0)) })
	until(t, "the first is let go", func() bool { return !chosen(first) })
	r.event(t, set, "AutoPreserve", "No longer preserves failed machine "+first.Name)
	if there := names(r.machines(t)); !slices.Contains(there, first.Name) {
		t.Fatalf("machines are %q: it was deleted before the machine controller had ended its preservation", there)
	}
	changeStatus(t, r, first, func(m *v1alpha1.Machine) { m.Status.CurrentStatus.PreserveExpiryTime = nil })
	until(t, "it is replaced", counted(0, 0, 3))
}
