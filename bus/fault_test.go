package bus_test

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
			r, g := newRig(t), newGate(t)
			req := create("m")
			holder, other, done := r.pair(t, g, req, identity(id))
			holder.proxy.Cut()
			again := bustest.Receive(t, "the second attempt", g.entered).Request
			if !again.GetRecover() || again.GetAttempt() != 2 || again.GetOperationId() != req.OperationID {
				t.Errorf("second request = %v, want attempt 2 of the same operation, to recover", again)
			}
			g.release()
			out := wantOK(t, bustest.Receive(t, "the outcome", done))
			if out.Attempts != 2 || out.Replica != other.Replica() {
				t.Errorf("outcome = %+v, want attempt 2 at the other replica", out)
			}
		})
	}
}

func TestDeadReplicasCreateWithoutIdentityWaits(t *testing.T) {
	t.Parallel()
	r, g := newRig(t), newGate(t)
	g.begins = true
	req := create("m")
	req.Timeout = 4 * time.Second
	sent := time.Now()
	holder, _, done := r.pair(t, g, req, identity(driverv1.CreateIdentity_CREATE_IDENTITY_NONE),
		func(cfg *bus.ServerConfig) { cfg.SettleTime = 500 * time.Millisecond })
	holder.proxy.Cut()
	bustest.Receive(t, "the second attempt", g.entered)
	// A lower bound, so that no slow machine can break it.
	if waited := time.Since(sent); waited < req.Timeout+500*time.Millisecond {
		t.Errorf("sent again after %s, within the lost call's deadline and settle time", waited)
	}
	g.release()
	if out := wantOK(t, bustest.Receive(t, "the outcome", done)); out.Attempts != 2 {
		t.Errorf("attempts = %d, want 2", out.Attempts)
	}
}

// A Machine from an older backup goes on under an operation id of its own. A create that
// was lost under another id has another token: its deadline comes first.
func TestLostCreateOfAnotherOperation(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*bus.Request){
		"first try":       func(*bus.Request) {},
		"looks first too": func(req *bus.Request) { req.Recover, req.Attempt = true, 1 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, g := newRig(t), newGate(t)
			g.begins = true
			lost := create("m")
			uid := bus.MachineOf(lost.Body).GetUid()
			lost.OperationID, lost.Timeout = uid+".create.2", 6*time.Second
			ctx, forget := context.WithCancel(t.Context())
			defer forget()
			holder := r.replica(t, g.handle)
			sent := time.Now()
			first := call(ctx, r.caller, lost)
			bustest.Receive(t, "the handler", g.entered)
			holder.proxy.Cut()
			bustest.Eventually(t, "the holder is taken for dead", func() bool { return r.session(holder) == nil })
			forget()
			bustest.Receive(t, "the end of the first call", first)
			r.replica(t, g.handle)

			req, why := lost, make(chan string, 9)
			req.OperationID = uid + ".create.3"
			req.OnWaiting = func(_ uint32, err error) { why <- err.Error() }
			change(&req)
			done := call(t.Context(), r.caller, req)
			if got := bustest.Receive(t, "why it waits", why); !strings.Contains(got, "a create of an earlier operation of this machine was lost") {
				t.Errorf("it waits because of %q", got)
			}
			again := bustest.Receive(t, "the second create", g.entered).Request
			if waited := time.Since(sent); waited < lost.Timeout {
				t.Errorf("sent after %s, within the lost call's deadline", waited)
			}
			if !again.GetRecover() {
				t.Errorf("request = %v, want one that looks first", again)
			}
			g.release()
			wantOK(t, bustest.Receive(t, "the outcome", done))
		})
	}
}

// A replica that does not know what came of its create has ended it, and the call may still
// take effect.
func TestReleasedCreateWithoutIdentityWaits(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	recovers := make(chan time.Time, 9)
	r.replica(t, func(_ context.Context, task *bus.Task) *driverv1.Result {
		if err := task.BeginMutation(); err != nil {
			return &driverv1.Result{Status: bus.StatusOf(err)}
		}
		if task.Request.GetRecover() {
			recovers <- time.Now()

			return created(task)
		}

		return &driverv1.Result{
			Status: bus.StatusOf(bus.Errorf(driverv1.Code_CODE_UNAVAILABLE, "the connection broke")), OutcomeUnknown: true,
		}
	}, identity(driverv1.CreateIdentity_CREATE_IDENTITY_NONE))
	req := create("m")
	req.Timeout = 4 * time.Second
	sent := time.Now()
	out, err := r.caller.Call(t.Context(), req)
	wantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_UNAVAILABLE)
	req.Recover, req.Attempt, req.Until = true, out.Attempts, out.Until
	wantOK(t, bustest.Receive(t, "the outcome", call(t.Context(), r.caller, req)))
	if waited := bustest.Receive(t, "the second attempt", recovers).Sub(sent); waited < req.Timeout {
		t.Errorf("tried again after %s, within the first call's deadline", waited)
	}
}

// Two calls of one operation, as for an instance and its disk, take each other's record for
// none of another attempt.
func TestTwoCallsBeginAtOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.replica(t, func(_ context.Context, task *bus.Task) *driverv1.Result {
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

		return created(task)
	})
	wantOK(t, bustest.Receive(t, "the outcome", call(t.Context(), r.caller, create("m"))))
}

// Where the lost attempt's claim says that it has begun nothing there is nothing to wait
// for, although nothing identifies a create.
func TestDeadReplicasCreateThatHasBegunNothing(t *testing.T) {
	t.Parallel()
	r, g := newRig(t), newGate(t)
	req := create("m")
	req.Timeout = time.Hour
	req.OnWaiting = func(_ uint32, why error) { t.Errorf("it waits: %v", why) }
	holder, _, done := r.pair(t, g, req, identity(driverv1.CreateIdentity_CREATE_IDENTITY_NONE))
	holder.proxy.Cut()
	bustest.Receive(t, "the second attempt", g.entered)
	g.release()
	if out := wantOK(t, bustest.Receive(t, "the outcome", done)); out.Attempts != 2 {
		t.Errorf("attempts = %d, want 2", out.Attempts)
	}
}

// A wait that is over is not begun anew because there was no room at its end.
func TestDeadReplicasCreateWithoutIdentityWaitsOnce(t *testing.T) {
	t.Parallel()
	r, g, full := newRig(t), newGate(t), newGate(t)
	g.begins = true
	none := identity(driverv1.CreateIdentity_CREATE_IDENTITY_NONE)
	one := func(cfg *bus.ServerConfig) { cfg.Slots = 1 }
	lost := r.replica(t, g.handle, none, one)
	req := create("m")
	req.Timeout = 2 * time.Second
	var told atomic.Value
	req.OnWaiting = func(_ uint32, why error) { told.Store(why.Error()) }
	done := call(t.Context(), r.caller, req)
	bustest.Receive(t, "the handler", g.entered)
	other := r.replica(t, full.handle, none, one)
	fill(t, r, other, full, 1)
	lost.proxy.Cut()
	got := bustest.Receive(t, "the outcome", done)
	wantError(t, got.err, bus.OriginTimeout, driverv1.Code_CODE_UNAVAILABLE)
	if why, _ := told.Load().(string); !strings.Contains(why, "no identity") {
		t.Errorf("told %q, want what is waited for", why)
	}
	full.release() // there is room now
	bustest.Eventually(t, "room", func() bool { return r.session(other).GetRunning() == 0 })
	req.Recover, req.Attempt, req.Until, req.Timeout = true, got.out.Attempts, got.out.Until, time.Hour
	out := wantOK(t, bustest.Receive(t, "the outcome, without another wait", call(t.Context(), r.caller, req)))
	if out.Replica != other.Replica() || out.Attempts != 2 {
		t.Errorf("outcome = %+v, want attempt 2 at %s", out, other.Replica())
	}
}

func TestCreateWithoutIdentityReturnsToAReplicaThatIsBack(t *testing.T) {
	t.Parallel()
	r, g := newRig(t), newGate(t)
	g.begins = true
	holder, other, done := r.pair(t, g, create("m"), identity(driverv1.CreateIdentity_CREATE_IDENTITY_NONE))
	holder.proxy.Cut()
	bustest.Eventually(t, "the holder is taken for dead", func() bool { return r.session(holder) == nil })
	holder.proxy.Mend()
	bustest.Eventually(t, "the holder is back", func() bool { return r.session(holder) != nil })
	g.release()
	out := wantOK(t, bustest.Receive(t, "the outcome", done))
	if out.Replica != holder.Replica() || g.runs.Load() != 1 {
		t.Errorf("outcome = %+v after %d runs, want one run at %s, none at %s",
			out, g.runs.Load(), holder.Replica(), other.Replica())
	}
}

func TestOnlyReplicaDies(t *testing.T) {
	t.Parallel()
	r, g := newRig(t), newGate(t)
	rep := r.replica(t, g.handle)
	req := create("m")
	done := call(t.Context(), r.caller, req)
	bustest.Receive(t, "the handler", g.entered)
	bustest.Eventually(t, "accepted", func() bool { return len(r.session(rep).GetOperations()) == 1 })
	rep.proxy.Cut()
	got := bustest.Receive(t, "the outcome", done)
	if bus.OriginOf(got.err) != bus.OriginTimeout || got.out.Attempts != 1 {
		t.Fatalf("outcome = %+v, %v; want an unknown outcome after one attempt", got.out, got.err)
	}
	// Its successor is told to look first.
	next := newGate(t)
	next.release()
	r.replica(t, next.handle)
	req.Recover, req.Attempt = true, got.out.Attempts
	out := wantOK(t, bustest.Receive(t, "the outcome", call(t.Context(), r.caller, req)))
	if env := bustest.Receive(t, "the request", next.entered).Request; !env.GetRecover() || env.GetAttempt() != 2 || out.Attempts != 2 {
		t.Errorf("request = %v, outcome = %+v; want attempt 2, to recover", env, out)
	}
}

func TestReadWhoseReplicaDiesIsAskedAgain(t *testing.T) {
	t.Parallel()
	r, g := newRig(t), newGate(t)
	holder, other, done := r.pair(t, g, status("m"))
	holder.proxy.Cut()
	bustest.Receive(t, "the second try", g.entered)
	g.release()
	if out := wantOK(t, bustest.Receive(t, "the outcome", done)); out.Replica != other.Replica() {
		t.Errorf("answered by %s, want %s", out.Replica, other.Replica())
	}
}

func TestLostResultIsFetched(t *testing.T) {
	t.Parallel()
	r, g := newRig(t), newGate(t)
	rep := r.replica(t, g.handle)
	req := create("m")
	done := call(t.Context(), r.caller, req)
	bustest.Receive(t, "the handler", g.entered)
	bustest.Eventually(t, "accepted", func() bool { return len(r.session(rep).GetOperations()) == 1 })
	// Cut for a moment: the result is sent to nowhere, nobody is dead for long.
	rep.proxy.Cut()
	bustest.Eventually(t, "the replica notices", func() bool { return !rep.conn.Up() })
	g.release()
	// It has settled when it does not run any more; only then may it come back.
	bustest.Eventually(t, "the operation ends", func() bool { return rep.Running() == 0 })
	rep.proxy.Mend()
	out := wantOK(t, bustest.Receive(t, "the outcome", done))
	if out.Attempts != 1 || g.runs.Load() != 1 || out.Result.GetCreate().GetInstance() == nil {
		t.Errorf("outcome = %+v after %d runs, want the result of the one attempt", out, g.runs.Load())
	}
}

func TestRecoverAttachesToWhatRuns(t *testing.T) {
	t.Parallel()
	r, g := newRig(t), newGate(t)
	rep := r.replica(t, g.handle)
	req := create("m")
	ctx, forget := context.WithCancel(t.Context())
	first := call(ctx, r.caller, req)
	bustest.Receive(t, "the handler", g.entered)
	forget()
	bustest.Receive(t, "the first call's end", first)

	next := newCaller(t, bustest.Connect(t, bus.Config{URLs: []string{r.srv.URL()}}), bus.CallerConfig{})
	accepted := make(chan string, 9)
	req.Recover, req.OnAccepted = true, func(_ uint32, replica string) { accepted <- replica }
	done := call(t.Context(), next, req)
	if got := bustest.Receive(t, "attached", accepted); got != rep.Replica() {
		t.Errorf("attached to %q, want %q", got, rep.Replica())
	}
	g.release()
	out := wantOK(t, bustest.Receive(t, "the outcome", done))
	if out.Attempts != 1 || g.runs.Load() != 1 {
		t.Errorf("outcome = %+v after %d runs, want the one attempt that ran already", out, g.runs.Load())
	}
	// A settled result is told again and again until it is acknowledged.
	wantOK(t, bustest.Receive(t, "the outcome again", call(t.Context(), next, req)))
	if g.runs.Load() != 1 {
		t.Errorf("ran %d times, want 1", g.runs.Load())
	}
	if err := next.Acknowledge(provider, rep.Replica(), req.OperationID); err != nil {
		t.Fatal(err)
	}
	bustest.Eventually(t, "the result is forgotten", func() bool { return len(r.session(rep).GetOperations()) == 0 })
	req.OnlyIfHeld = true
	bustest.Eventually(t, "the other mcm knows", func() bool { return len(next.Replicas()[0].Session.GetOperations()) == 0 })
	wantOK(t, bustest.Receive(t, "the stored outcome", call(t.Context(), next, req)))
	never := create("n")
	never.Recover, never.OnlyIfHeld = true, true
	_, err := next.Call(t.Context(), never)
	wantError(t, err, bus.OriginDriver, driverv1.Code_CODE_NOT_FOUND)
	if g.runs.Load() != 1 {
		t.Errorf("ran %d times, want 1: only what is held was asked for", g.runs.Load())
	}
}

// Whom nobody can be heard by knows nothing of what is held.
func TestRecoverWithoutTheBus(t *testing.T) {
	t.Parallel()
	r, g := newRig(t), newGate(t)
	r.replica(t, g.handle)
	r.srv.Stop()
	bustest.Eventually(t, "the connection is lost", func() bool { return !r.caller.Up() })
	req := create("m")
	req.Recover, req.Attempt, req.OnlyIfHeld = true, 1, true
	_, err := r.caller.Call(t.Context(), req)
	wantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_UNAVAILABLE)
}

func TestRecoverOfWhatNobodyImplements(t *testing.T) {
	t.Parallel()
	r, g := newRig(t), newGate(t)
	rep := r.replica(t, g.handle, func(c *bus.ServerConfig) {
		c.Capabilities = []driverv1.Operation{driverv1.Operation_OPERATION_DELETE}
	})
	r.sees(t, rep)
	req := create("m")
	req.Recover, req.Attempt = true, 1
	_, err := r.caller.Call(t.Context(), req)
	wantError(t, err, bus.OriginDriver, driverv1.Code_CODE_UNIMPLEMENTED)
}

func TestHolderOutOfReachIsWaitedFor(t *testing.T) {
	t.Parallel()
	r, g := newRig(t), newGate(t)
	req := create("m")
	ctx, forget := context.WithCancel(t.Context())
	rep := r.replica(t, g.handle)
	first := call(ctx, r.caller, req)
	bustest.Receive(t, "the handler", g.entered)
	bustest.Eventually(t, "the session lists it", func() bool { return len(r.session(rep).GetOperations()) == 1 })
	forget()
	bustest.Receive(t, "the first call's end", first)
	other := r.replica(t, g.handle)

	req.Recover, req.Attempt = true, 1
	// Out of reach, but not dead yet: asking it must not start a second attempt.
	rep.proxy.Cut()
	bustest.Eventually(t, "the replica notices", func() bool { return !rep.conn.Up() })
	done := call(t.Context(), r.caller, req)
	rep.proxy.Mend()
	g.release()
	if out := wantOK(t, bustest.Receive(t, "the outcome", done)); g.runs.Load() != 1 || out.Replica != rep.Replica() {
		t.Errorf("outcome = %+v after %d runs, want one run at %s, none at %s",
			out, g.runs.Load(), rep.Replica(), other.Replica())
	}
}

func TestWiretapHidesThatNobodyListens(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	tap := bustest.Raw(t, r.srv.URL())
	if _, err := tap.SubscribeSync("mcm.>"); err != nil || tap.Flush() != nil {
		t.Fatal(err)
	}
	// Nobody: the mutation's outcome is unknown to the caller, the read's is not.
	_, err := r.caller.Call(t.Context(), create("m"))
	wantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_DEADLINE_EXCEEDED)
	read := status("m")
	read.Timeout = time.Second
	if _, err := r.caller.Call(t.Context(), read); err == nil {
		t.Error("a read that nobody answered succeeded")
	}
	// Somebody: the wiretap changes nothing.
	g := newGate(t)
	g.release()
	r.replica(t, g.handle)
	wantOK(t, bustest.Receive(t, "the outcome", call(t.Context(), r.caller, create("m"))))
}

func TestFramesOfStrangersAreDropped(t *testing.T) {
	t.Parallel()
	r, g := newRig(t), newGate(t)
	rep := r.replica(t, g.handle)
	raw := bustest.Raw(t, r.srv.URL())
	replies := make(chan string, 9)
	if _, err := raw.Subscribe("mcm.v1.*.driver.>", func(m *nats.Msg) { replies <- m.Reply }); err != nil || raw.Flush() != nil {
		t.Fatal(err)
	}
	req := create("m")
	var progressed atomic.Int32
	req.OnProgress = func(string) { progressed.Add(1) }
	accepted := make(chan struct{}, 1)
	req.OnAccepted = func(uint32, string) { accepted <- struct{}{} }
	done := call(t.Context(), r.caller, req)
	bustest.Receive(t, "the handler", g.entered)
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
	if raw.Publish(reply, []byte{0xff}) != nil || raw.Publish(reply+"x", []byte("nobody waits for it")) != nil {
		t.Fatal("publish")
	}
	want := uint64(len(forged) + 2)
	bustest.Eventually(t, "forged frames are counted", func() bool { return r.caller.Dropped() == want })
	g.release()
	out := wantOK(t, bustest.Receive(t, "the outcome", done))
	if out.Result.GetCreate().GetInstance() == nil {
		t.Errorf("result = %v, want the driver's", out.Result)
	}
}

func TestFloodOfProgress(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.replica(t, func(_ context.Context, task *bus.Task) *driverv1.Result {
		for i := range 20000 {
			task.Progress(strings.Repeat("x", i%100))
		}

		return created(task)
	})
	calm := newGate(t)
	calm.release()
	a, b := call(t.Context(), r.caller, create("loud")), call(t.Context(), r.caller, create("calm"))
	wantOK(t, bustest.Receive(t, "the loud one's outcome", a))
	wantOK(t, bustest.Receive(t, "the other's outcome", b))
}

func TestLateOperationIsCancelled(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	cancelled := make(chan error, 1)
	r.replica(t, func(ctx context.Context, task *bus.Task) *driverv1.Result {
		<-ctx.Done()
		cancelled <- ctx.Err()

		return &driverv1.Result{Status: bus.StatusOf(ctx.Err())}
	})
	req := create("m")
	req.Timeout = 100 * time.Millisecond
	_, err := r.caller.Call(t.Context(), req)
	wantError(t, err, bus.OriginDriver, driverv1.Code_CODE_DEADLINE_EXCEEDED)
	if got := bustest.Receive(t, "the handler's context", cancelled); !errors.Is(got, context.DeadlineExceeded) {
		t.Errorf("context error = %v, want its deadline", got)
	}
}
