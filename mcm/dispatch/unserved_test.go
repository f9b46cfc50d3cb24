package dispatch_test

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/mcm/dispatch"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A machine that waits for a driver of a provider is notified why, and when there is one.
func TestServes(t *testing.T) {
	t.Parallel()
	r, machine, other := newRig(t), newMachine("m1"), newMachine("m2")
	op := operation(dispatch.Create, machine, 0)
	serves := func(want bool, part string) {
		t.Helper()
		reason, served := r.Serves(op)
		if served != want || !strings.Contains(reason, part) {
			t.Errorf("the provider is served: %t, with reason %q; want %t and %q", served, reason, want, part)
		}
	}
	serves(false, "")
	r.noticed(t, machine)
	serves(false, "no driver for provider virtual")
	waiting := r.Waiting().GetOperations()
	if len(waiting) != 1 || waiting[0].GetOperationId() != op.ID() || waiting[0].GetElapsed() == nil ||
		!strings.Contains(waiting[0].GetLastProgress(), "no driver for provider virtual") {
		t.Errorf("waiting: %v, want the create of m1, and for what", waiting)
	}
	r.Serves(operation(dispatch.Create, other, 0))
	r.Forget(other.UID)
	r.replica(t, atOnce)
	r.noticed(t, machine)
	serves(true, "")
	if n := len(r.Waiting().GetOperations()); n != 0 {
		t.Errorf("%d operations wait", n)
	}
	select {
	case name := <-r.notices:
		t.Errorf("notice of %v, which is gone", name)
	default:
	}
}

// A machine whose status reports a wait is notified of its end.
func TestWaitReported(t *testing.T) {
	t.Parallel()
	r, machine := newRig(t), newMachine("m1")
	g := newGate(t)
	r.replica(t, g.handle)
	op := operation(dispatch.Create, machine, 0)
	op.WaitReported = true
	r.Start(op)
	bustest.Receive(t, "the driver to get the create", g.entered)
	r.noticed(t, machine)
	if s := r.Start(op); s.Phase != dispatch.Running || !s.Waited {
		t.Errorf("operation with a driver is %+v, want running and marked as one that waited", s)
	}
}

// A machine waits for the provider that its class names now.
func TestServesAnotherProvider(t *testing.T) {
	t.Parallel()
	r, machine := newRig(t), newMachine("m1")
	op := operation(dispatch.Create, machine, 0)
	for _, name := range []string{"absent", "missing"} {
		op.Provider = name
		r.Serves(op)
	}
	waiting := r.Waiting().GetOperations()
	if len(waiting) != 1 || waiting[0].GetProvider() != "missing" {
		t.Errorf("waiting: %v, want one for the provider asked for last", waiting)
	}
	r.Withdraw(machine.UID)
	if waiting := r.Waiting().GetOperations(); len(waiting) != 0 {
		t.Errorf("waiting: %v, want none", waiting)
	}
}

// A driver without sessions is there when it answers, whatever it says.
func TestServesPlainly(t *testing.T) {
	t.Parallel()
	r, machine := newRig(t), newMachine("m1")
	conn, err := nats.Connect(r.srv.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	asked := make(chan driverv1.Operation, 10)
	_, err = conn.QueueSubscribe("mcm.v1."+cluster+".plain."+provider+".>", "driver", func(m *nats.Msg) {
		var request driverv1.Envelope
		if err := proto.Unmarshal(m.Data, &request); err != nil {
			t.Error(err)
		}
		asked <- bus.OperationOf(&request)
		answer, err := proto.Marshal(&driverv1.Envelope{
			OperationId: request.GetOperationId(), Attempt: request.GetAttempt(),
			Body: &driverv1.Envelope_Result{Result: &driverv1.Result{Status: &driverv1.Status{Code: driverv1.Code_CODE_UNIMPLEMENTED}}},
		})
		if err == nil {
			err = m.Respond(answer)
		}
		if err != nil {
			t.Error(err)
		}
	})
	if err == nil {
		err = conn.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	op := operation(dispatch.Create, machine, 0)
	if _, served := r.Serves(op); served {
		t.Error("it is there before anybody knows")
	}
	r.noticed(t, machine)
	if reason, served := r.Serves(op); !served {
		t.Errorf("it is not there although it has answered: %s", reason)
	}
	if got := bustest.Receive(t, "a question", asked); got != driverv1.Operation_OPERATION_STATUS {
		t.Errorf("it was asked for %v, want what changes nothing", got)
	}
	if n := len(asked); n != 0 {
		t.Errorf("it was asked %d times more", n)
	}
}

// A subscriber to everything keeps NATS from reporting no responders, and serves
// nothing.
func TestAListenerServesNoProvider(t *testing.T) {
	t.Parallel()
	r, machine := newRig(t), newMachine("m1")
	conn, err := nats.Connect(r.srv.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	heard, err := conn.SubscribeSync("mcm.>")
	if err == nil {
		err = conn.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	op := operation(dispatch.Create, machine, 0)
	op.Timeout = time.Second
	r.Serves(op)
	asked := 0
	bustest.Eventually(t, "it is asked again", func() bool {
		m, err := heard.NextMsg(time.Second)
		if err == nil && strings.Contains(m.Subject, ".plain."+provider+".status.") {
			asked++
		}

		return asked > 1
	})
	if _, served := r.Serves(op); served {
		t.Error("who does not answer serves")
	}
	r.replica(t, atOnce)
	bustest.Eventually(t, "the replica is noticed", func() bool {
		_, served := r.Serves(op)

		return served
	})
}
