package caller_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestDeadReplicasMutationGoesToAnother(t *testing.T) {
	t.Parallel()
	for name, id := range map[string]driverv1.CreateIdentity{
		"token":       driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN,
		"unique name": driverv1.CreateIdentity_CREATE_IDENTITY_UNIQUE_NAME,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, g := optest.NewRig(t), optest.NewGate(t)
			req := optest.Create("m")
			holder, other, done := r.Pair(t, g, req, optest.Identity(id))
			holder.Proxy.Cut()
			again := bustest.Receive(t, "the second attempt", g.Entered).Request
			if !again.GetRecover() || again.GetAttempt() != 2 || again.GetOperationId() != req.OperationID {
				t.Errorf("second request = %v, want attempt 2 of the same operation, to recover", again)
			}
			g.Release()
			out := optest.WantOK(t, bustest.Receive(t, "the outcome", done))
			if out.Attempts != 2 || out.Replica != other.Replica() {
				t.Errorf("outcome = %+v, want attempt 2 at the other replica", out)
			}
		})
	}
}

func TestDeadReplicasCreateWithoutIdentityWaits(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	g.Begins = true
	req := optest.Create("m")
	req.Timeout = 4 * time.Second
	sent := time.Now()
	holder, _, done := r.Pair(t, g, req, optest.Identity(driverv1.CreateIdentity_CREATE_IDENTITY_NONE),
		func(cfg *replica.Config) { cfg.SettleTime = 500 * time.Millisecond })
	holder.Proxy.Cut()
	bustest.Receive(t, "the second attempt", g.Entered)
	// A lower bound, so that no slow machine can break it.
	if waited := time.Since(sent); waited < req.Timeout+500*time.Millisecond {
		t.Errorf("sent again after %s, within the lost call's deadline and settle time", waited)
	}
	g.Release()
	if out := optest.WantOK(t, bustest.Receive(t, "the outcome", done)); out.Attempts != 2 {
		t.Errorf("attempts = %d, want 2", out.Attempts)
	}
}

// A Machine from an older backup goes on under an operation id of its own. A create that
// was lost under another id has another token: its deadline comes first.
func TestLostCreateOfAnotherOperation(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*caller.Request){
		"first try":       func(*caller.Request) {},
		"looks first too": func(req *caller.Request) { req.Recover, req.Attempt = true, 1 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, g := optest.NewRig(t), optest.NewGate(t)
			g.Begins = true
			lost := optest.Create("m")
			uid := bus.MachineOf(lost.Body).GetUid()
			lost.OperationID, lost.Timeout = uid+".create.2", 6*time.Second
			ctx, forget := context.WithCancel(t.Context())
			defer forget()
			holder := r.Replica(t, g.Handle)
			sent := time.Now()
			first := optest.Call(ctx, r.Caller, lost)
			bustest.Receive(t, "the handler", g.Entered)
			holder.Proxy.Cut()
			bustest.Eventually(t, "the holder is taken for dead", func() bool { return r.Session(holder) == nil })
			forget()
			bustest.Receive(t, "the end of the first call", first)
			r.Replica(t, g.Handle)

			req, why := lost, make(chan string, 9)
			req.OperationID = uid + ".create.3"
			req.OnWaiting = func(_ uint32, err error) { why <- err.Error() }
			change(&req)
			done := optest.Call(t.Context(), r.Caller, req)
			if got := bustest.Receive(t, "why it waits", why); !strings.Contains(got, "the outcome of an earlier create of this machine is unknown") {
				t.Errorf("it waits because of %q", got)
			}
			again := bustest.Receive(t, "the second create", g.Entered).Request
			if waited := time.Since(sent); waited < lost.Timeout {
				t.Errorf("sent after %s, within the lost call's deadline", waited)
			}
			if !again.GetRecover() {
				t.Errorf("request = %v, want one that looks first", again)
			}
			g.Release()
			optest.WantOK(t, bustest.Receive(t, "the outcome", done))
		})
	}
}

// A replica that does not know what came of its create has ended it, and the call may still
// take effect.
func TestReleasedCreateWithoutIdentityWaits(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	recovers := make(chan time.Time, 9)
	r.Replica(t, func(_ context.Context, task *replica.Task) *driverv1.Result {
		if err := task.BeginMutation(); err != nil {
			return &driverv1.Result{Status: bus.StatusOf(err)}
		}
		if task.Request.GetRecover() {
			recovers <- time.Now()

			return optest.Created(task)
		}

		return &driverv1.Result{
			Status: bus.StatusOf(bus.Errorf(driverv1.Code_CODE_UNAVAILABLE, "the connection broke")), OutcomeUnknown: true,
		}
	}, optest.Identity(driverv1.CreateIdentity_CREATE_IDENTITY_NONE))
	req := optest.Create("m")
	req.Timeout = 4 * time.Second
	sent := time.Now()
	out, err := r.Caller.Call(t.Context(), req)
	optest.WantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_UNAVAILABLE)
	req.Recover, req.Attempt, req.Until = true, out.Attempts, out.Until
	optest.WantOK(t, bustest.Receive(t, "the outcome", optest.Call(t.Context(), r.Caller, req)))
	if waited := bustest.Receive(t, "the second attempt", recovers).Sub(sent); waited < req.Timeout {
		t.Errorf("tried again after %s, within the first call's deadline", waited)
	}
}

// Two calls of one operation, as for an instance and its disk, take each other's record for
// none of another attempt.
func TestTwoCallsBeginAtOnce(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	r.Replica(t, func(_ context.Context, task *replica.Task) *driverv1.Result {
		const calls = 20
		errs := make(chan error, calls)
		for range calls {
			go func() { errs <- task.BeginMutation() }()
		}
		for range calls {
			if err := <-errs; err != nil {
				return &driverv1.Result{Status: bus.StatusOf(err)}
			}
		}

		return optest.Created(task)
	})
	optest.WantOK(t, bustest.Receive(t, "the outcome", optest.Call(t.Context(), r.Caller, optest.Create("m"))))
}

// Where the lost attempt's claim says that it has begun nothing there is nothing to wait
// for, although nothing identifies a create.
func TestDeadReplicasCreateThatHasBegunNothing(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	req := optest.Create("m")
	req.Timeout = time.Hour
	req.OnWaiting = func(_ uint32, why error) { t.Errorf("it waits: %v", why) }
	holder, _, done := r.Pair(t, g, req, optest.Identity(driverv1.CreateIdentity_CREATE_IDENTITY_NONE))
	holder.Proxy.Cut()
	bustest.Receive(t, "the second attempt", g.Entered)
	g.Release()
	if out := optest.WantOK(t, bustest.Receive(t, "the outcome", done)); out.Attempts != 2 {
		t.Errorf("attempts = %d, want 2", out.Attempts)
	}
}

// A wait that is over is not repeated because there was no room at its end.
func TestDeadReplicasCreateWithoutIdentityWaitsOnce(t *testing.T) {
	t.Parallel()
	r, g, full := optest.NewRig(t), optest.NewGate(t), optest.NewGate(t)
	g.Begins = true
	none := optest.Identity(driverv1.CreateIdentity_CREATE_IDENTITY_NONE)
	one := func(cfg *replica.Config) { cfg.Slots = 1 }
	lost := r.Replica(t, g.Handle, none, one)
	req := optest.Create("m")
	req.Timeout = 2 * time.Second
	var told atomic.Value
	req.OnWaiting = func(_ uint32, why error) { told.Store(why.Error()) }
	done := optest.Call(t.Context(), r.Caller, req)
	bustest.Receive(t, "the handler", g.Entered)
	other := r.Replica(t, full.Handle, none, one)
	fill(t, r, other, full, 1)
	lost.Proxy.Cut()
	got := bustest.Receive(t, "the outcome", done)
	optest.WantError(t, got.Err, bus.OriginTimeout, driverv1.Code_CODE_UNAVAILABLE)
	if why, _ := told.Load().(string); !strings.Contains(why, "does not show at once whether it made the instance") {
		t.Errorf("OnWaiting got %q, want the reason of the wait", why)
	}
	full.Release() // there is room now
	bustest.Eventually(t, "room", func() bool { return r.Session(other).GetRunning() == 0 })
	req.Recover, req.Attempt, req.Until, req.Timeout = true, got.Out.Attempts, got.Out.Until, time.Hour
	out := optest.WantOK(t, bustest.Receive(t, "the outcome, without another wait", optest.Call(t.Context(), r.Caller, req)))
	if out.Replica != other.Replica() || out.Attempts != 2 {
		t.Errorf("outcome = %+v, want attempt 2 at %s", out, other.Replica())
	}
}

func TestCreateWithoutIdentityReturnsToAReplicaThatIsBack(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	g.Begins = true
	holder, other, done := r.Pair(t, g, optest.Create("m"), optest.Identity(driverv1.CreateIdentity_CREATE_IDENTITY_NONE))
	holder.Proxy.Cut()
	bustest.Eventually(t, "the holder is taken for dead", func() bool { return r.Session(holder) == nil })
	holder.Proxy.Mend()
	bustest.Eventually(t, "the holder is back", func() bool { return r.Session(holder) != nil })
	g.Release()
	out := optest.WantOK(t, bustest.Receive(t, "the outcome", done))
	if out.Replica != holder.Replica() || g.Runs.Load() != 1 {
		t.Errorf("outcome = %+v after %d runs, want one run at %s, none at %s",
			out, g.Runs.Load(), holder.Replica(), other.Replica())
	}
}

func TestOnlyReplicaDies(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	rep := r.Replica(t, g.Handle)
	req := optest.Create("m")
	done := optest.Call(t.Context(), r.Caller, req)
	bustest.Receive(t, "the handler", g.Entered)
	bustest.Eventually(t, "accepted", func() bool { return len(r.Session(rep).GetOperations()) == 1 })
	rep.Proxy.Cut()
	got := bustest.Receive(t, "the outcome", done)
	if bus.OriginOf(got.Err) != bus.OriginTimeout || got.Out.Attempts != 1 {
		t.Fatalf("outcome = %+v, %v; want an unknown outcome after one attempt", got.Out, got.Err)
	}
	// Its successor must look first.
	next := optest.NewGate(t)
	next.Release()
	r.Replica(t, next.Handle)
	req.Recover, req.Attempt = true, got.Out.Attempts
	out := optest.WantOK(t, bustest.Receive(t, "the outcome", optest.Call(t.Context(), r.Caller, req)))
	if env := bustest.Receive(t, "the request", next.Entered).Request; !env.GetRecover() || env.GetAttempt() != 2 || out.Attempts != 2 {
		t.Errorf("request = %v, outcome = %+v; want attempt 2, to recover", env, out)
	}
}

func TestReadWhoseReplicaDiesIsAskedAgain(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	holder, other, done := r.Pair(t, g, optest.Status("m"))
	holder.Proxy.Cut()
	bustest.Receive(t, "the second try", g.Entered)
	g.Release()
	if out := optest.WantOK(t, bustest.Receive(t, "the outcome", done)); out.Replica != other.Replica() {
		t.Errorf("answered by %s, want %s", out.Replica, other.Replica())
	}
}

func TestLostResultIsFetched(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	rep := r.Replica(t, g.Handle)
	req := optest.Create("m")
	done := optest.Call(t.Context(), r.Caller, req)
	bustest.Receive(t, "the handler", g.Entered)
	bustest.Eventually(t, "accepted", func() bool { return len(r.Session(rep).GetOperations()) == 1 })
	// Cut for a moment: the result is sent to nowhere, no replica is dead for long.
	rep.Proxy.Cut()
	bustest.Eventually(t, "the replica notices", func() bool { return !rep.Conn.Up() })
	g.Release()
	// It has settled when it does not run any more; only then may it come back.
	bustest.Eventually(t, "the operation ends", func() bool { return rep.Running() == 0 })
	rep.Proxy.Mend()
	out := optest.WantOK(t, bustest.Receive(t, "the outcome", done))
	if out.Attempts != 1 || g.Runs.Load() != 1 || out.Result.GetCreate().GetInstance() == nil {
		t.Errorf("outcome = %+v after %d runs, want the result of the one attempt", out, g.Runs.Load())
	}
}

func TestRecoverAttachesToWhatRuns(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	rep := r.Replica(t, g.Handle)
	req := optest.Create("m")
	ctx, forget := context.WithCancel(t.Context())
	first := optest.Call(ctx, r.Caller, req)
	bustest.Receive(t, "the handler", g.Entered)
	forget()
	bustest.Receive(t, "the first call's end", first)

	next := optest.NewCaller(t, bustest.Connect(t, bus.Config{URLs: []string{r.NATS.URL()}}), caller.Config{})
	accepted := make(chan string, 9)
	req.Recover, req.OnAccepted = true, func(_ uint32, replica string) { accepted <- replica }
	done := optest.Call(t.Context(), next, req)
	if got := bustest.Receive(t, "attached", accepted); got != rep.Replica() {
		t.Errorf("attached to %q, want %q", got, rep.Replica())
	}
	g.Release()
	out := optest.WantOK(t, bustest.Receive(t, "the outcome", done))
	if out.Attempts != 1 || g.Runs.Load() != 1 {
		t.Errorf("outcome = %+v after %d runs, want the one attempt that ran already", out, g.Runs.Load())
	}
	// A result is sent again and again until it is acknowledged.
	optest.WantOK(t, bustest.Receive(t, "the outcome again", optest.Call(t.Context(), next, req)))
	if g.Runs.Load() != 1 {
		t.Errorf("ran %d times, want 1", g.Runs.Load())
	}
	if err := next.Acknowledge(optest.Provider, rep.Replica(), req.OperationID); err != nil {
		t.Fatal(err)
	}
	bustest.Eventually(t, "the result is forgotten", func() bool { return len(r.Session(rep).GetOperations()) == 0 })
	req.OnlyIfHeld = true
	bustest.Eventually(t, "the other mcm knows", func() bool { return len(next.Replicas()[0].Session.GetOperations()) == 0 })
	optest.WantOK(t, bustest.Receive(t, "the stored outcome", optest.Call(t.Context(), next, req)))
	never := optest.Create("n")
	never.Recover, never.OnlyIfHeld = true, true
	_, err := next.Call(t.Context(), never)
	optest.WantError(t, err, bus.OriginDriver, driverv1.Code_CODE_NOT_FOUND)
	if g.Runs.Load() != 1 {
		t.Errorf("ran %d times, want 1: only what is held was asked for", g.Runs.Load())
	}
}

// A Caller that hears no replica does not know which operations they have.
func TestRecoverWithoutTheBus(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	r.Replica(t, g.Handle)
	r.NATS.Stop()
	bustest.Eventually(t, "the connection is lost", func() bool { return !r.Caller.Up() })
	req := optest.Create("m")
	req.Recover, req.Attempt, req.OnlyIfHeld = true, 1, true
	_, err := r.Caller.Call(t.Context(), req)
	optest.WantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_UNAVAILABLE)
}

func TestRecoverOfWhatNobodyImplements(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	rep := r.Replica(t, g.Handle, func(c *replica.Config) {
		c.Capabilities = []driverv1.Operation{driverv1.Operation_OPERATION_DELETE}
	})
	r.Sees(t, rep)
	req := optest.Create("m")
	req.Recover, req.Attempt = true, 1
	_, err := r.Caller.Call(t.Context(), req)
	optest.WantError(t, err, bus.OriginDriver, driverv1.Code_CODE_UNIMPLEMENTED)
}

func TestHolderOutOfReachIsWaitedFor(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	req := optest.Create("m")
	ctx, forget := context.WithCancel(t.Context())
	rep := r.Replica(t, g.Handle)
	first := optest.Call(ctx, r.Caller, req)
	bustest.Receive(t, "the handler", g.Entered)
	bustest.Eventually(t, "the session lists it", func() bool { return len(r.Session(rep).GetOperations()) == 1 })
	forget()
	bustest.Receive(t, "the first call's end", first)
	other := r.Replica(t, g.Handle)

	req.Recover, req.Attempt = true, 1
	// Out of reach, but not dead yet: asking it must not start a second attempt.
	rep.Proxy.Cut()
	bustest.Eventually(t, "the replica notices", func() bool { return !rep.Conn.Up() })
	done := optest.Call(t.Context(), r.Caller, req)
	rep.Proxy.Mend()
	g.Release()
	if out := optest.WantOK(t, bustest.Receive(t, "the outcome", done)); g.Runs.Load() != 1 || out.Replica != rep.Replica() {
		t.Errorf("outcome = %+v after %d runs, want one run at %s, none at %s",
			out, g.Runs.Load(), rep.Replica(), other.Replica())
	}
}

func TestWiretapHidesThatNobodyListens(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	tap := bustest.Raw(t, r.NATS.URL())
	if _, err := tap.SubscribeSync("mcm.>"); err != nil || tap.Flush() != nil {
		t.Fatal(err)
	}
	// Nobody: the mutation's outcome is unknown to the caller, the read's is not.
	_, err := r.Caller.Call(t.Context(), optest.Create("m"))
	optest.WantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_DEADLINE_EXCEEDED)
	read := optest.Status("m")
	read.Timeout = time.Second
	if _, err := r.Caller.Call(t.Context(), read); err == nil {
		t.Error("a read without an answer succeeded")
	}
	// Somebody: the wiretap changes nothing.
	g := optest.NewGate(t)
	g.Release()
	r.Replica(t, g.Handle)
	optest.WantOK(t, bustest.Receive(t, "the outcome", optest.Call(t.Context(), r.Caller, optest.Create("m"))))
}

func TestFramesOfStrangersAreDropped(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	rep := r.Replica(t, g.Handle)
	raw := bustest.Raw(t, r.NATS.URL())
	replies := make(chan string, 9)
	if _, err := raw.Subscribe("mcm.v1.*.driver.>", func(m *nats.Msg) { replies <- m.Reply }); err != nil || raw.Flush() != nil {
		t.Fatal(err)
	}
	req := optest.Create("m")
	var progressed atomic.Int32
	req.OnProgress = func(string) { progressed.Add(1) }
	accepted := make(chan struct{}, 1)
	req.OnAccepted = func(uint32, string) { accepted <- struct{}{} }
	done := optest.Call(t.Context(), r.Caller, req)
	bustest.Receive(t, "the handler", g.Entered)
	reply := bustest.Receive(t, "the reply subject", replies)
	bustest.Receive(t, "accepted", accepted)

	result := &driverv1.Envelope_Result{Result: &driverv1.Result{}}
	forged := []*driverv1.Envelope{
		{OperationId: "other", Attempt: 1, Replica: rep.Replica(), Body: result},
		{OperationId: req.OperationID, Attempt: 2, Replica: rep.Replica(), Body: result},
		{OperationId: req.OperationID, Attempt: 1, Replica: "other", Body: result},
		{OperationId: req.OperationID, Attempt: 1, Body: result},
		{OperationId: req.OperationID, Attempt: 1, Replica: rep.Replica(), Body: &driverv1.Envelope_Hello{Hello: &driverv1.Hello{}}},
	}
	for _, env := range forged {
		payload, err := bus.Encode(env, "")
		if err != nil || raw.Publish(reply, payload) != nil {
			t.Fatal(err)
		}
	}
	if raw.Publish(reply, []byte{0xff}) != nil || raw.Publish(reply+"x", []byte("no call waits for it")) != nil {
		t.Fatal("publish")
	}
	want := uint64(len(forged) + 2)
	bustest.Eventually(t, "forged frames are counted", func() bool { return r.Caller.Dropped() == want })
	g.Release()
	out := optest.WantOK(t, bustest.Receive(t, "the outcome", done))
	if out.Result.GetCreate().GetInstance() == nil {
		t.Errorf("result = %v, want the driver's", out.Result)
	}
}

func TestFloodOfProgress(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	r.Replica(t, func(_ context.Context, task *replica.Task) *driverv1.Result {
		for i := range 20000 {
			task.Progress(strings.Repeat("x", i%100))
		}

		return optest.Created(task)
	})
	calm := optest.NewGate(t)
	calm.Release()
	a, b := optest.Call(t.Context(), r.Caller, optest.Create("loud")), optest.Call(t.Context(), r.Caller, optest.Create("calm"))
	optest.WantOK(t, bustest.Receive(t, "the loud one's outcome", a))
	optest.WantOK(t, bustest.Receive(t, "the other's outcome", b))
}

func TestLateOperationIsCancelled(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	cancelled := make(chan error, 1)
	r.Replica(t, func(ctx context.Context, task *replica.Task) *driverv1.Result {
		<-ctx.Done()
		cancelled <- ctx.Err()

		return &driverv1.Result{Status: bus.StatusOf(ctx.Err())}
	})
	req := optest.Create("m")
	req.Timeout = 100 * time.Millisecond
	_, err := r.Caller.Call(t.Context(), req)
	optest.WantError(t, err, bus.OriginDriver, driverv1.Code_CODE_DEADLINE_EXCEEDED)
	if got := bustest.Receive(t, "the handler's context", cancelled); !errors.Is(got, context.DeadlineExceeded) {
		t.Errorf("context error = %v, want its deadline", got)
	}
}
