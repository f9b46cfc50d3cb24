package bus_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestMutationIsClaimedAndItsOutcomeStored(t *testing.T) {
	t.Parallel()
	r, g := newClaimRig(t), newGate(t)
	a, b := r.replica(t, g.handle), r.replica(t, g.handle)
	req := create("m")
	done := call(t.Context(), r.caller, req)
	bustest.Receive(t, "the handler", g.entered)
	if c := r.claimOf(t, req); c.GetState() != driverv1.Claim_STATE_RUNNING || c.GetOperationId() != req.OperationID {
		t.Errorf("claim when the handler runs = %v, want the running operation", c)
	}
	g.release()
	out := wantOK(t, bustest.Receive(t, "the outcome", done))
	bustest.Eventually(t, "the outcome is stored", func() bool {
		return r.claimOf(t, req).GetState() == driverv1.Claim_STATE_SETTLED
	})
	c := r.claimOf(t, req)
	if c.GetReplica() != out.Replica || c.GetOutcome().GetProviderId() != "virtual://m" || c.GetOutcome().GetSealed() != nil {
		t.Errorf("claim = %v, want the outcome of %s, and nothing sealed for want of a key", c, out.Replica)
	}
	// The next operations of the machine take the claim over, at whichever replica.
	for i, op := range []string{"initialize", "delete"} {
		next := then(req, op, string(rune('1'+i)))
		wantOK(t, bustest.Receive(t, op, call(t.Context(), r.caller, next)))
		bustest.Eventually(t, "its outcome is stored", func() bool {
			c := r.claimOf(t, req)

			return c.GetOperationId() == next.OperationID && c.GetState() == driverv1.Claim_STATE_SETTLED
		})
	}
	_, _ = a, b
}

func TestOutcomeOutlivesReplicaAndManager(t *testing.T) {
	t.Parallel()
	key := newKey(t)
	for name, tc := range map[string]struct {
		seal    bool
		partial bool
		text    string
		reason  string
	}{
		"sealed":   {seal: true, text: "no capacity", reason: "the replica knows the control plane's key"},
		"unsealed": {partial: true, text: "the driver's own words were not kept: its replica did not know the control plane's key", reason: "it does not"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, own := newClaimRig(t), newKey(t)
			entered, open := make(chan struct{}), make(chan struct{})
			rep := r.replica(t, func(context.Context, *bus.Task) *driverv1.Result {
				close(entered)
				<-open

				return &driverv1.Result{
					Status:  &driverv1.Status{Code: driverv1.Code_CODE_RESOURCE_EXHAUSTED, Message: "no capacity"},
					Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{LastKnownState: "disk-7"}},
				}
			}, func(cfg *bus.ServerConfig) {
				if tc.seal {
					cfg.Seal = func(_ string, m proto.Message) *driverv1.Sealed {
						box, err := own.Seal(m, key.Public())
						if err != nil {
							t.Error(err)
						}

						return box
					}
				}
			})
			req := create("m")
			ctx, crash := context.WithCancel(t.Context())
			first := call(ctx, r.caller, req)
			bustest.Receive(t, "the handler", entered)
			crash()
			bustest.Receive(t, "the first manager's end", first)
			close(open)
			bustest.Eventually(t, "the outcome is stored", func() bool {
				return r.claimOf(t, req).GetState() == driverv1.Claim_STATE_SETTLED
			})
			rep.proxy.Cut()
			bustest.Eventually(t, "nobody hears of the replica", func() bool { return r.session(rep) == nil })

			next := newCaller(t, bustest.Connect(t, bus.Config{URLs: []string{r.srv.URL()}}),
				bus.CallerConfig{Operations: &bus.StreamConfig{}, Key: key})
			req.Recover, req.Attempt = true, 1
			got := bustest.Receive(t, "the outcome", call(t.Context(), next, req))
			wantError(t, got.err, bus.OriginDriver, driverv1.Code_CODE_RESOURCE_EXHAUSTED)
			if got.err.Error() != tc.text || got.out.Partial != tc.partial || got.out.Attempts != 1 {
				t.Errorf("outcome = %+v, error %q, want %q: %s", got.out, got.err, tc.text, tc.reason)
			}
			if state := got.out.Result.GetCreate().GetLastKnownState(); (state == "disk-7") == tc.partial {
				t.Errorf("last known state = %q: %s", state, tc.reason)
			}
		})
	}
}

// One is cut off and goes on; once the other has taken over, the first begins nothing.
func TestCutOffReplicaIsFenced(t *testing.T) {
	t.Parallel()
	r := newClaimRig(t)
	entered := make(chan *bus.Task, 9)
	verdicts := make(chan error, 9)
	resume := make(chan struct{})
	handle := func(_ context.Context, task *bus.Task) *driverv1.Result {
		entered <- task
		if task.Request.GetAttempt() == 1 {
			<-resume
		}
		err := task.BeginMutation()
		verdicts <- err
		if err != nil {
			return &driverv1.Result{Status: bus.StatusOf(err)}
		}

		return created(task)
	}
	a, b := r.replica(t, handle), r.replica(t, handle)
	req := create("m")
	done := call(t.Context(), r.caller, req)
	first := bustest.Receive(t, "the first attempt", entered)
	holder, other := a, b
	if c := r.claimOf(t, req); c.GetReplica() == b.Replica() {
		holder, other = b, a
	}
	holder.proxy.Hold(bustest.ToServer)
	second := bustest.Receive(t, "the second attempt", entered)
	if err := bustest.Receive(t, "the second one's verdict", verdicts); err != nil {
		t.Errorf("the replica that took over may not begin: %v", err)
	}
	out := wantOK(t, bustest.Receive(t, "the outcome", done))
	if out.Replica != other.Replica() || out.Attempts != 2 || !second.Request.GetRecover() || first.Request.GetRecover() {
		t.Errorf("outcome = %+v, want that of attempt 2 at %s, with recover", out, other.Replica())
	}
	// Back on the bus, the first one still has its attempt, and may not begin.
	holder.proxy.Mend()
	bustest.Eventually(t, "it is back", func() bool { return r.session(holder) != nil })
	close(resume)
	if err := bustest.Receive(t, "the first one's verdict", verdicts); bus.CodeOf(err) != driverv1.Code_CODE_ABORTED {
		t.Errorf("the fenced attempt's BeginMutation: %v, want it refused", err)
	}
	bustest.Eventually(t, "the second's outcome stands", func() bool {
		c := r.claimOf(t, req)

		return c.GetReplica() == other.Replica() && c.GetState() == driverv1.Claim_STATE_SETTLED
	})
	// It takes new work.
	again := create("n")
	again.Timeout = time.Minute
	wantOK(t, bustest.Receive(t, "other work", call(t.Context(), r.caller, again)))
}

// The stream takes the record that a call begins, and its acknowledgement is lost: the
// replica begins nothing, and the next attempt goes on from there.
func TestBeginUnacknowledged(t *testing.T) {
	t.Parallel()
	r := newClaimRig(t)
	entered, resume := make(chan *bus.Task, 9), make(chan struct{})
	verdicts := make(chan error, 9)
	var first atomic.Bool
	rep := r.replica(t, func(_ context.Context, task *bus.Task) *driverv1.Result {
		entered <- task
		held := first.CompareAndSwap(false, true)
		if held {
			<-resume
		}
		err := task.BeginMutation()
		if held {
			verdicts <- err
		}
		if err != nil {
			return &driverv1.Result{Status: bus.StatusOf(err)}
		}

		return created(task)
	})
	req := create("m")
	done := call(t.Context(), r.caller, req)
	bustest.Receive(t, "the handler", entered)
	rep.proxy.Hold(bustest.ToClient)
	close(resume)
	if err := bustest.Receive(t, "the verdict", verdicts); bus.CodeOf(err) != driverv1.Code_CODE_ABORTED {
		t.Errorf("BeginMutation without an acknowledgement: %v, want it refused", err)
	}
	if c := r.claimOf(t, req); c.GetState() != driverv1.Claim_STATE_BEGUN {
		t.Errorf("claim = %v, want the record that was not acknowledged", c)
	}
	got := bustest.Receive(t, "the outcome", done)
	wantError(t, got.err, bus.OriginTimeout, driverv1.Code_CODE_ABORTED)
	rep.proxy.Mend()
	req.Recover, req.Attempt = true, got.out.Attempts
	out := wantOK(t, bustest.Receive(t, "the next attempt", call(t.Context(), r.caller, req)))
	if want := got.out.Attempts + 1; out.Attempts != want {
		t.Errorf("attempts = %d, want %d", out.Attempts, want)
	}
}
