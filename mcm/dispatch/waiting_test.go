package dispatch_test

import (
	"strings"
	"testing"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/mcm/dispatch"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// An operation that no driver has is listed with what it waits for, and no longer once one
// has it.
func TestWaiting(t *testing.T) {
	t.Parallel()
	r, first, second := newRig(t), newMachine("m1"), newMachine("m2")
	if got := r.Waiting(); len(got.GetOperations()) > 0 {
		t.Errorf("waiting at the beginning: %v", got)
	}
	r.Start(operation(dispatch.Create, first, 0))
	r.noticed(t, first)
	r.Start(operation(dispatch.Create, second, 0))
	want := func(op *driverv1.OperationState, name string) {
		t.Helper()
		if op.GetName() != name || op.GetProvider() != provider || op.GetOperation() != driverv1.Operation_OPERATION_CREATE ||
			op.GetOperationId() == "" || op.GetElapsed() == nil || !strings.Contains(op.GetLastProgress(), "no driver for provider virtual") {
			t.Errorf("waiting: %v, want the create of %s, and for what", op, name)
		}
	}
	bustest.Eventually(t, "both wait for a driver", func() bool {
		got := r.Waiting().GetOperations()

		return len(got) == 2 && got[1].GetLastProgress() != ""
	})
	got := r.Waiting().GetOperations()
	want(got[0], "m1")
	want(got[1], "m2")
	g := newGate(t)
	r.replica(t, g.handle)
	bustest.Receive(t, "a create", g.entered)
	bustest.Receive(t, "a create", g.entered)
	bustest.Eventually(t, "nothing waits", func() bool { return len(r.Waiting().GetOperations()) == 0 })
	g.release()
}
