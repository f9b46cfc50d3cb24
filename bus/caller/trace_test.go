package caller_test

import (
	"context"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/optest"
)

// TestTraceParent has a trace reach every replica that gets the operation, a
// plain driver too.
func TestTraceParent(t *testing.T) {
	t.Parallel()
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	r, g := optest.NewRig(t), optest.NewGate(t)
	plain, nc := make(chan *nats.Msg, 10), bustest.Raw(t, r.NATS.URL())
	if _, err := nc.ChanSubscribe("mcm.v1."+optest.Cluster+".plain.>", plain); err != nil || nc.Flush() != nil {
		t.Fatal(err)
	}
	first := r.Replica(t, g.Handle)
	req := optest.Create("m")
	req.TraceParent = parent
	done := optest.Call(t.Context(), r.Caller, req)
	if got := bustest.Receive(t, "the first attempt", g.Entered).TraceParent; got != parent {
		t.Errorf("first attempt is of trace %q, want %q", got, parent)
	}
	second := r.Replica(t, g.Handle)
	first.Proxy.Cut()
	task := bustest.Receive(t, "the second attempt", g.Entered)
	if task.TraceParent != parent || task.Request.GetAttempt() != 2 {
		t.Errorf("attempt %d is of trace %q, want 2 of %q", task.Request.GetAttempt(), task.TraceParent, parent)
	}
	g.Release()
	optest.WantOK(t, bustest.Receive(t, "the outcome", done))

	read := optest.Status("m")
	done = optest.Call(t.Context(), r.Caller, read)
	if got := bustest.Receive(t, "a read without a trace", g.Entered).TraceParent; got != "" {
		t.Errorf("a read is of trace %q, want none", got)
	}
	optest.WantOK(t, bustest.Receive(t, "the read's outcome", done))
	second.Proxy.Cut()
	bustest.Eventually(t, "no replica lives", func() bool { return len(r.Caller.Replicas()) == 0 })
	read = optest.Status("m")
	read.TraceParent = parent
	ctx, cancel := context.WithCancel(t.Context())
	done = optest.Call(ctx, r.Caller, read)
	if got := bustest.Receive(t, "a read at the plain driver", plain).Header["traceparent"]; len(got) != 1 || got[0] != parent {
		t.Errorf("a plain driver gets trace %q, want %q", got, parent)
	}
	cancel() // it answers nothing
	bustest.Receive(t, "the end of the read", done)
}
