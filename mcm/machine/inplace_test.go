package machine_test

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// Machines of one pool whose updates have failed do not wait for each other.
func TestFailedUpdatesOfOnePool(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var machines []*v1alpha1.Machine
	for _, name := range []string{"one", "two"} {
		m := r.machine(name)
		metav1.SetMetaDataLabel(&m.ObjectMeta, v1alpha1.LabelKeyMachineDeployment, "pool")
		r.join(t, m, ready(corev1.ConditionFalse))
		r.lived(t, m, v1alpha1.MachineInPlaceUpdateFailed, v1alpha1.LastOperation{Type: "InPlaceUpdate", State: "Failed", Description: "it failed"})
		machines = append(machines, m)
	}
	r.startDriver(t)
	r.startManager(t)
	failed := func() (n int) {
		for _, m := range machines {
			if stored := r.get(t, m); stored != nil && stored.Status.CurrentStatus.Phase == v1alpha1.MachineFailed {
				n++
			}
		}

		return n
	}
	if !poll(t, func() bool { return failed() == 1 }) { // the other one's turn comes when this one is replaced
		t.Errorf("%d of the machines are Failed, want one", failed())
	}
}

// A Node that was drained for an update that has not started is put to use again.
func TestUpdateInPlaceNotBegun(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	m := r.machine("m")
	node := r.join(t, m, ready(corev1.ConditionTrue), corev1.NodeCondition{
		Type: v1alpha1.NodeInPlaceUpdate, Status: corev1.ConditionTrue, Reason: v1alpha1.ReasonSelectedForUpdate,
	})
	r.change(t, node, func() {
		node.Spec.Unschedulable = true
		metav1.SetMetaDataLabel(&node.ObjectMeta, v1alpha1.LabelKeyNodeSelectedForUpdate, "true")
	})
	r.lived(t, m, v1alpha1.MachineRunning, v1alpha1.LastOperation{Type: "HealthCheck", State: "Successful"})
	r.startDriver(t)
	r.startManager(t)
	r.event(t, m, "InPlaceUpdateDropped", node.Name)
	if !poll(t, func() bool { return !r.node(t, node.Name).Spec.Unschedulable }) {
		t.Error("the node stays cordoned")
	}
}

// An update in place that another manager has started ends by what the agent on the Node reports.
func TestUpdateInPlaceEnds(t *testing.T) {
	t.Parallel()
	updating := v1alpha1.LastOperation{Type: "InPlaceUpdate", State: "Processing", Description: "Node x is being updated"}
	for name, tc := range map[string]struct {
		from     v1alpha1.MachinePhase
		result   string
		want     transition
		cordoned bool
		event    string
	}{
		"successful": {
			v1alpha1.MachineInPlaceUpdating, v1alpha1.LabelValueUpdateSuccessful,
			transition{v1alpha1.MachineRunning, "HealthCheck", "Successful", "", "Machine %s successfully re-joined the cluster", false},
			false, "InPlaceUpdated",
		},
		"successful after all": {
			v1alpha1.MachineInPlaceUpdateFailed, v1alpha1.LabelValueUpdateSuccessful,
			transition{v1alpha1.MachineRunning, "HealthCheck", "Successful", "", "Machine %s successfully re-joined the cluster", false},
			false, "InPlaceUpdated",
		},
		"failed": {
			v1alpha1.MachineInPlaceUpdating, v1alpha1.LabelValueUpdateFailed,
			transition{v1alpha1.MachineInPlaceUpdateFailed, "InPlaceUpdate", "Failed", "", "Machine %s failed to update dependencies: no space left", false},
			true, "FailedInPlaceUpdate",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			m := r.machine("m")
			m.Spec.MachineInPlaceUpdateTimeout = &metav1.Duration{Duration: 2 * time.Hour}
			m.Spec.MachineHealthTimeout = &metav1.Duration{Duration: 2 * time.Hour}
			node := r.join(t, m, ready(corev1.ConditionTrue))
			r.change(t, node, func() {
				node.Spec.Unschedulable = true
				metav1.SetMetaDataLabel(&node.ObjectMeta, v1alpha1.LabelKeyNodeSelectedForUpdate, "true")
			})
			r.lived(t, m, tc.from, updating)
			r.startDriver(t)
			r.startManager(t)
			r.until(t, "a pass over it", m, func(m *v1alpha1.Machine) bool {
				return len(m.Status.Conditions) > 0 && m.Status.Conditions[0].Reason != "AnHourAgo"
			})
			node = r.node(t, node.Name)
			r.change(t, node, func() {
				metav1.SetMetaDataLabel(&node.ObjectMeta, v1alpha1.LabelKeyNodeUpdateResult, tc.result)
				metav1.SetMetaDataAnnotation(&node.ObjectMeta, v1alpha1.AnnotationKeyUpdateFailedReason, "no space left")
			})
			r.leads(t, m, tc.want, "the label decides")
			r.event(t, m, tc.event, m.Name)
			if got := r.node(t, node.Name).Spec.Unschedulable; got != tc.cordoned {
				t.Errorf("cordoned: %t, want %t", got, tc.cordoned)
			}
		})
	}
}
