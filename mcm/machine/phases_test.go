package machine_test

import (
	"context"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A Node that vanishes is worse than one that is unhealthy, and comes back like
// one.
func TestNodeVanishes(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.machine("a")
	r.create(t, m)
	node := r.join(t, m)
	r.phase(t, m, v1alpha1.MachineRunning)
	// A running manager might give the Node its finalizer back in between.
	r.stop()
	r.forceDelete(t, node)
	r.startManager(t)
	got := r.phase(t, m, v1alpha1.MachineUnknown)
	want := "Machine " + m.Name + " is unhealthy - changing MachinePhase to Unknown. Node conditions: the node does not exist"
	if last := got.Status.LastOperation; last.Type != "HealthCheck" || last.State != "Processing" || last.Description != want {
		t.Errorf("last operation is %+v", last)
	}
	r.join(t, m)
	got = r.phase(t, m, v1alpha1.MachineRunning)
	if last := got.Status.LastOperation; last.Type != "HealthCheck" || last.State != "Successful" {
		t.Errorf("last operation is %+v", last)
	}
}

// A class may know that its instances take long, or that they take no time.
func TestOperationTimeoutOfAClass(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	timeouts := make(chan time.Duration, 10)
	r.cloud.answer(func(_ context.Context, task *replica.Task) *driverv1.Result {
		if bus.Mutates(task.Operation) {
			timeouts <- task.Request.GetTimeout().AsDuration()
		}

		return nil
	})
	class := r.class()
	r.change(t, class, func() {
		class.Annotations = map[string]string{v1alpha1.AnnotationKeyOperationTimeout: "15m"}
	})
	m := r.pending(t, "a")
	for range 2 { // create and initialize
		if d := <-timeouts; d != 15*time.Minute {
			t.Errorf("operation may take %s, want what the class says", d)
		}
	}
	r.change(t, class, func() { class.Annotations[v1alpha1.AnnotationKeyOperationTimeout] = "15" })
	const text = `MachineClass small: annotation machinebus.io/operation-timeout is "15": want a duration from 1s to 24h, such as 15m`
	bustest.Eventually(t, "the manager has heard of the class's change", func() bool {
		heard := &v1alpha1.MachineClass{}
		err := r.seen.Get(t.Context(), client.ObjectKeyFromObject(class), heard)

		return err == nil && heard.Annotations[v1alpha1.AnnotationKeyOperationTimeout] == "15"
	})
	late := r.machine("late")
	r.create(t, late)
	r.event(t, late, "InvalidMachine", text)
	r.delete(t, m) // which a typing error does not stop
	r.gone(t, m)
	r.event(t, m, "InvalidField", text)
	if d := <-timeouts; d != r.settings.OperationTimeout {
		t.Errorf("delete may take %s, want the default", d)
	}
	r.change(t, class, func() { delete(class.Annotations, v1alpha1.AnnotationKeyOperationTimeout) })
	r.phase(t, late, v1alpha1.MachinePending)
}
