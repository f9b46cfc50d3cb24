package bus_test

import (
	"context"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus/bustest"
)

// TestTraceParent has a trace reach every replica that gets the operation, a
// plain driver too.
func TestTraceParent(t *testing.T) {
	t.Parallel()
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	r, g := newRig(t), newGate(t)
	plain, nc := make(chan *nats.Msg, 10), bustest.Raw(t, r.srv.URL())
	if _, err := nc.ChanSubscribe("mcm.v1."+cluster+".plain.>", plain); err != nil || nc.Flush() != nil {
		t.Fatal(err)
	}
	first := r.replica(t, g.handle)
	req := create("m")
	req.TraceParent = parent
	done := call(t.Context(), r.caller, req)
	if got := bustest.Receive(t, "the first attempt", g.entered).TraceParent; got != parent {
		t.Errorf("first attempt is of trace %q, want %q", got, parent)
	}
	second := r.replica(t, g.handle)
	first.proxy.Cut()
	task := bustest.Receive(t, "the second attempt", g.entered)
	if task.TraceParent != parent || task.Request.GetAttempt() != 2 {
		t.Errorf("attempt %d is of trace %q, want 2 of %q", task.Request.GetAttempt(), task.TraceParent, parent)
	}
	g.release()
	wantOK(t, bustest.Receive(t, "the outcome", done))

	read := status("m")
	done = call(t.Context(), r.caller, read)
	if got := bustest.Receive(t, "a read that nobody traces", g.entered).TraceParent; got != "" {
		t.Errorf("a read is of trace %q, want none", got)
	}
	wantOK(t, bustest.Receive(t, "the read's outcome", done))
	second.proxy.Cut()
	bustest.Eventually(t, "no replica lives", func() bool { return len(r.caller.Replicas()) == 0 })
	read = status("m")
	read.TraceParent = parent
	ctx, cancel := context.WithCancel(t.Context())
	done = call(ctx, r.caller, read)
	if got := bustest.Receive(t, "a read at the plain driver", plain).Header["traceparent"]; len(got) != 1 || got[0] != parent {
		t.Errorf("a plain driver is told of trace %q, want %q", got, parent)
	}
	cancel() // it answers nothing
	bustest.Receive(t, "the end of the read", done)
}
