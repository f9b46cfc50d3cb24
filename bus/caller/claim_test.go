package caller_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/chaos"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestMutationIsClaimedAndItsOutcomeStored(t *testing.T) {
	t.Parallel()
	r, g := optest.NewStoredRig(t), optest.NewGate(t)
	a, b := r.Replica(t, g.Handle), r.Replica(t, g.Handle)
	req := optest.Create("m")
	done := optest.Call(t.Context(), r.Caller, req)
	bustest.Receive(t, "the handler", g.Entered)
	if c := r.ClaimOf(t, req); c.GetState() != driverv1.Claim_STATE_RUNNING || c.GetOperationId() != req.OperationID {
		t.Errorf("claim when the handler runs = %v, want the running operation", c)
	}
	g.Release()
	out := optest.WantOK(t, bustest.Receive(t, "the outcome", done))
	bustest.Eventually(t, "the outcome is stored", func() bool {
		return r.ClaimOf(t, req).GetState() == driverv1.Claim_STATE_SETTLED
	})
	c := r.ClaimOf(t, req)
	if c.GetReplica() != out.Replica || c.GetOutcome().GetProviderId() != "virtual://m" || c.GetOutcome().GetSealed() != nil {
		t.Errorf("claim = %v, want the outcome of %s, and nothing sealed for want of a key", c, out.Replica)
	}
	// The next operations of the machine take the claim over, at whichever replica.
	for i, op := range []string{"initialize", "delete"} {
		next := optest.Then(req, op, string(rune('1'+i)))
		optest.WantOK(t, bustest.Receive(t, op, optest.Call(t.Context(), r.Caller, next)))
		bustest.Eventually(t, "its outcome is stored", func() bool {
			c := r.ClaimOf(t, req)

			return c.GetOperationId() == next.OperationID && c.GetState() == driverv1.Claim_STATE_SETTLED
		})
	}
	_, _ = a, b
}

func TestOutcomeOutlivesReplicaAndManager(t *testing.T) {
	t.Parallel()
	key := optest.NewKey(t)
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
			r, own := optest.NewStoredRig(t), optest.NewKey(t)
			entered, open := make(chan struct{}), make(chan struct{})
			rep := r.Replica(t, func(context.Context, *replica.Task) *driverv1.Result {
				close(entered)
				<-open

				return &driverv1.Result{
					Status:  &driverv1.Status{Code: driverv1.Code_CODE_RESOURCE_EXHAUSTED, Message: "no capacity"},
					Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{LastKnownState: "disk-7"}},
				}
			}, func(cfg *replica.Config) {
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
			req := optest.Create("m")
			ctx, crash := context.WithCancel(t.Context())
			first := optest.Call(ctx, r.Caller, req)
			bustest.Receive(t, "the handler", entered)
			crash()
			bustest.Receive(t, "the first manager's end", first)
			close(open)
			bustest.Eventually(t, "the outcome is stored", func() bool {
				return r.ClaimOf(t, req).GetState() == driverv1.Claim_STATE_SETTLED
			})
			rep.Proxy.Cut()
			bustest.Eventually(t, "no session of the replica arrives", func() bool { return r.Session(rep) == nil })

			next := optest.NewCaller(t, bustest.Connect(t, bus.Config{URLs: []string{r.NATS.URL()}}),
				caller.Config{Operations: &caller.StreamConfig{}, Key: key})
			req.Recover, req.Attempt = true, 1
			got := bustest.Receive(t, "the outcome", optest.Call(t.Context(), next, req))
			optest.WantError(t, got.Err, bus.OriginDriver, driverv1.Code_CODE_RESOURCE_EXHAUSTED)
			if got.Err.Error() != tc.text || got.Out.Partial != tc.partial || got.Out.Attempts != 1 {
				t.Errorf("outcome = %+v, error %q, want %q: %s", got.Out, got.Err, tc.text, tc.reason)
			}
			if state := got.Out.Result.GetCreate().GetLastKnownState(); (state == "disk-7") == tc.partial {
				t.Errorf("last known state = %q: %s", state, tc.reason)
			}
		})
	}
}

// One is cut off and goes on; once the other has taken over, the first begins nothing.
func TestCutOffReplicaIsFenced(t *testing.T) {
	t.Parallel()
	r := optest.NewStoredRig(t)
	entered := make(chan *replica.Task, 9)
	verdicts := make(chan error, 9)
	resume := make(chan struct{})
	handle := func(_ context.Context, task *replica.Task) *driverv1.Result {
		entered <- task
		if task.Request.GetAttempt() == 1 {
			<-resume
		}
		err := task.BeginMutation()
		verdicts <- err
		if err != nil {
			return &driverv1.Result{Status: bus.StatusOf(err)}
		}

		return optest.Created(task)
	}
	a, b := r.Replica(t, handle), r.Replica(t, handle)
	req := optest.Create("m")
	done := optest.Call(t.Context(), r.Caller, req)
	first := bustest.Receive(t, "the first attempt", entered)
	holder, other := a, b
	if c := r.ClaimOf(t, req); c.GetReplica() == b.Replica() {
		holder, other = b, a
	}
	holder.Proxy.Hold(chaos.ToServer)
	second := bustest.Receive(t, "the second attempt", entered)
	if err := bustest.Receive(t, "the second one's verdict", verdicts); err != nil {
		t.Errorf("the replica that took over may not begin: %v", err)
	}
	out := optest.WantOK(t, bustest.Receive(t, "the outcome", done))
	if out.Replica != other.Replica() || out.Attempts != 2 || !second.Request.GetRecover() || first.Request.GetRecover() {
		t.Errorf("outcome = %+v, want that of attempt 2 at %s, with recover", out, other.Replica())
	}
	// Back on the bus, the first one still has its attempt, and may not begin.
	holder.Proxy.Mend()
	bustest.Eventually(t, "it is back", func() bool { return r.Session(holder) != nil })
	close(resume)
	if err := bustest.Receive(t, "the first one's verdict", verdicts); bus.CodeOf(err) != driverv1.Code_CODE_ABORTED {
		t.Errorf("the fenced attempt's BeginMutation: %v, want it refused", err)
	}
	bustest.Eventually(t, "the second's outcome stands", func() bool {
		c := r.ClaimOf(t, req)

		return c.GetReplica() == other.Replica() && c.GetState() == driverv1.Claim_STATE_SETTLED
	})
	// It takes new work.
	again := optest.Create("n")
	again.Timeout = time.Minute
	optest.WantOK(t, bustest.Receive(t, "other work", optest.Call(t.Context(), r.Caller, again)))
}

// The stream takes the record that a call begins, and its acknowledgement is lost: the
// replica begins nothing, and the next attempt goes on from there.
func TestBeginUnacknowledged(t *testing.T) {
	t.Parallel()
	r := optest.NewStoredRig(t)
	entered, resume := make(chan *replica.Task, 9), make(chan struct{})
	verdicts := make(chan error, 9)
	var first atomic.Bool
	rep := r.Replica(t, func(_ context.Context, task *replica.Task) *driverv1.Result {
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

		return optest.Created(task)
	})
	req := optest.Create("m")
	done := optest.Call(t.Context(), r.Caller, req)
	bustest.Receive(t, "the handler", entered)
	rep.Proxy.Hold(chaos.ToClient)
	close(resume)
	if err := bustest.Receive(t, "the verdict", verdicts); bus.CodeOf(err) != driverv1.Code_CODE_ABORTED {
		t.Errorf("BeginMutation without an acknowledgement: %v, want it refused", err)
	}
	if c := r.ClaimOf(t, req); c.GetState() != driverv1.Claim_STATE_BEGUN {
		t.Errorf("claim = %v, want the record that was not acknowledged", c)
	}
	got := bustest.Receive(t, "the outcome", done)
	optest.WantError(t, got.Err, bus.OriginTimeout, driverv1.Code_CODE_ABORTED)
	rep.Proxy.Mend()
	req.Recover, req.Attempt = true, got.Out.Attempts
	out := optest.WantOK(t, bustest.Receive(t, "the next attempt", optest.Call(t.Context(), r.Caller, req)))
	if want := got.Out.Attempts + 1; out.Attempts != want {
		t.Errorf("attempts = %d, want %d", out.Attempts, want)
	}
}
