package dispatch_test

import (
	"context"
	"testing"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/dispatch"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func reads(c *replica.Config) {
	c.Capabilities = append(c.Capabilities, driverv1.Operation_OPERATION_STATUS)
}

func TestAsk(t *testing.T) {
	t.Parallel()
	r, machine := newRig(t), newMachine("m1")
	machine.Spec.ProviderID = "virtual://m1"
	op := operation("", machine, 0)
	if s := r.Ask(op); s.Phase != dispatch.Waiting || s.Kind != dispatch.Status {
		t.Errorf("Ask returned %+v", s)
	}
	r.noticed(t, machine)
	waiting := r.Ask(op)
	if waiting.Phase != dispatch.Waiting || !waiting.Waited {
		t.Errorf("question without a driver is %+v", waiting)
	}
	contains(t, waiting.Reason, "no driver for provider virtual")
	g := newGate(t)
	g.answer = func(task *replica.Task) *driverv1.Result {
		id := task.Request.GetStatus().GetMachine().GetProviderId()

		return &driverv1.Result{
			Status: &driverv1.Status{Code: driverv1.Code_CODE_UNINITIALIZED},
			Payload: &driverv1.Result_InstanceStatus{InstanceStatus: &driverv1.StatusResponse{
				Instance: &driverv1.Instance{ProviderId: id, NodeName: "n1"},
			}},
		}
	}
	r.replica(t, g.handle, reads)
	bustest.Receive(t, "the driver to get the question", g.entered)
	if s := r.Ask(op); s.Phase == dispatch.Done {
		t.Errorf("question is answered before its driver has: %+v", s)
	}
	if _, known := r.State(machine.UID); known {
		t.Error("a question counts as the machine's operation")
	}
	g.release()
	r.noticed(t, machine)
	s := r.Ask(op)
	if s.Phase != dispatch.Done || dispatch.CodeOf(s.Err) != dispatch.Uninitialized || s.Instance == nil ||
		s.Instance.ProviderID != "virtual://m1" || s.Instance.NodeName != "n1" {
		t.Errorf("answer is %+v, instance %+v", s, s.Instance)
	}
	// It is returned once; what was true then may not be true now.
	if s := r.Ask(op); s.Phase != dispatch.Waiting {
		t.Errorf("Ask after the answer returned %+v", s)
	}
	bustest.Receive(t, "the driver to get the next question", g.entered)
}

// A class that names another provider by now has that one asked.
func TestAskAnotherProvider(t *testing.T) {
	t.Parallel()
	r, machine := newRig(t), newMachine("m1")
	op := operation("", machine, 0)
	op.Provider = "absent"
	r.Ask(op)
	r.noticed(t, machine)
	g := newGate(t)
	g.release()
	r.replica(t, g.handle, reads)
	op.Provider = provider
	r.Ask(op)
	bustest.Receive(t, "the other driver to get the question", g.entered)
	bustest.Eventually(t, "an answer", func() bool { return r.Ask(op).Phase == dispatch.Done })
}

// A request for a machine that is gone ends.
func TestForgetAQuestion(t *testing.T) {
	t.Parallel()
	r, machine := newRig(t), newMachine("m1")
	ended := make(chan struct{})
	entered := make(chan struct{}, 1)
	r.replica(t, func(ctx context.Context, _ *replica.Task) *driverv1.Result {
		entered <- struct{}{}
		<-ctx.Done()
		close(ended)

		return &driverv1.Result{Status: bus.StatusOf(ctx.Err())}
	}, reads)
	op := operation("", machine, 0)
	r.Ask(op)
	bustest.Receive(t, "the driver to get the question", entered)
	r.Forget(machine.UID)
	select {
	case name := <-r.notices:
		t.Errorf("notice of %v", name)
	default:
	}
	if s := r.Ask(op); s.Phase != dispatch.Waiting || s.Waited {
		t.Errorf("Ask after Forget returned %+v", s)
	}
	r.stop() // and does not block
}
