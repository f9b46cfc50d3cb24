package machineset_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestFailedMachinesAreBounded has more machines fail, with more to say, than one
// object should hold.
func TestFailedMachinesAreBounded(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	const n = 130
	set := r.set("a", n)
	r.create(t, set)
	r.settled(t, set, n)
	text := v1alpha1.CreateFailedText("Internal", strings.Repeat("the cloud has much to say, ", 400)+"and an end")
	for _, m := range r.machines(t) {
		changeStatus(t, r, m, func(m *v1alpha1.Machine) {
			m.Status.LastOperation = v1alpha1.LastOperation{State: v1alpha1.MachineStateFailed, Description: text}
		})
	}
	var got v1alpha1.MachineSetStatus
	until(t, "all are counted", func() bool { got = r.get(t, set).Status; return got.FailedMachineCount == n })
	if len(got.FailedMachines) != v1alpha1.MostFailedMachines {
		t.Fatalf("status lists %d machines, want %d", len(got.FailedMachines), v1alpha1.MostFailedMachines)
	}
	all := names(r.machines(t))
	for i, m := range got.FailedMachines {
		d := m.LastOperation.Description
		if m.Name != all[i] || len(d) > 600 || !strings.HasPrefix(d, "Cloud provider message - machine codes error: code = [Internal]") ||
			!strings.HasSuffix(d, "and an end]") {
			t.Fatalf("machine %d is %s, want %s; its text is %q", i, m.Name, all[i], d)
		}
	}
}

// TestInvalidSetSaysSo breaks a set and mends it.
func TestInvalidSetSaysSo(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	set := r.set("a", 1)
	r.create(t, set)
	r.settled(t, set, 1)
	change(t, r, set, func(set *v1alpha1.MachineSet) { set.Spec.Template.Spec.Class = v1alpha1.ClassSpec{} })
	conditions := func(want string) func() bool {
		return func() bool {
			got := r.get(t, set)
			text := ""
			for _, c := range got.Status.Conditions {
				text += fmt.Sprintf("%s=%s/%s: %s", c.Type, c.Status, c.Reason, c.Message)
			}

			return got.Status.ObservedGeneration == got.Generation && strings.HasPrefix(text, want) && (text == "") == (want == "")
		}
	}
	until(t, "the status says that it is invalid", conditions(
		"ReplicaFailure=True/InvalidSpec: Nothing is done for this set: spec.template.spec.class needs a kind and a name"))
	if got := r.get(t, set); got.Status.ReadyReplicas != 1 {
		t.Errorf("status is %+v, want the numbers of before", got.Status)
	}
	changeStatus(t, r, r.machines(t)[0], func(m *v1alpha1.Machine) { m.Status.CurrentStatus.Phase = v1alpha1.MachineUnknown })
	until(t, "the numbers are those of now", func() bool {
		got := r.get(t, set)

		return got.Status.Replicas == 1 && got.Status.ReadyReplicas == 0
	})
	change(t, r, set, func(set *v1alpha1.MachineSet) {
		set.Spec.Template.Spec.Class = v1alpha1.ClassSpec{Kind: v1alpha1.KindMachineClass, Name: "small"}
	})
	until(t, "the status says so no longer", conditions(""))
}
