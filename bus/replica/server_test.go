package replica_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A speaker sends a replica what a Caller never would.
type speaker struct {
	nc     *nats.Conn
	reply  string
	frames chan *driverv1.Envelope
}

func newSpeaker(t *testing.T, r *optest.Rig) *speaker {
	t.Helper()
	r.Ready(t) // a replica has something to claim with
	s := &speaker{
		nc: bustest.Raw(t, r.NATS.URL()), frames: make(chan *driverv1.Envelope, 100),
		reply: "mcm.v1." + optest.Cluster + ".reply." + optest.Provider + ".speaker.1",
	}
	_, err := s.nc.Subscribe("mcm.v1.*.reply.*.speaker.*", func(m *nats.Msg) {
		env, err := bus.Decode(m.Data, m.Header.Get("Content-Type"))
		if err != nil {
			t.Error(err)

			return
		}
		s.frames <- env
	})
	if err != nil || s.nc.Flush() != nil {
		t.Fatal(err)
	}

	return s
}

func (s *speaker) send(t *testing.T, subject, reply string, env *driverv1.Envelope) {
	t.Helper()
	payload, err := bus.Encode(env, "")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.nc.PublishMsg(&nats.Msg{Subject: subject, Reply: reply, Data: payload}); err != nil {
		t.Fatal(err)
	}
}

// result waits for a result, whatever frames come before it.
func (s *speaker) result(t *testing.T) *driverv1.Result {
	t.Helper()
	for {
		if r := bustest.Receive(t, "a result", s.frames).GetResult(); r != nil {
			return r
		}
	}
}

func directed(rep *optest.Replica, verb, machine string) string {
	return "mcm.v1." + optest.Cluster + ".replica." + optest.Provider + "." + rep.Replica() + "." + verb + ".shop." + machine
}

// request is a full envelope for a create.
func request(change ...func(*driverv1.Envelope)) *driverv1.Envelope {
	req := optest.Create("m")
	env := req.Body
	none := uint64(0)
	env.OperationId, env.Attempt, env.Timeout = req.OperationID, 1, durationpb.New(time.Minute)
	env.ClaimTerms = &driverv1.ClaimTerms{Sequence: &none}
	for _, f := range change {
		f(env)
	}

	return env
}

func TestServerRefuses(t *testing.T) { //nolint:tparallel // its cases share one replica and one reply subject
	t.Parallel()
	cases := map[string]struct {
		reason string
		verb   string
		change func(*driverv1.Envelope)
		code   driverv1.Code
		text   string
	}{
		"lower epoch": {
			"a deposed mcm must not start anything [ENV-6]", "create",
			func(e *driverv1.Envelope) { e.Epoch = 6 }, driverv1.Code_CODE_ABORTED, "epoch 7",
		},
		"no machine": {
			"nothing could keep two mutations of it apart", "create",
			func(e *driverv1.Envelope) { e.GetCreate().Machine.Uid = "" }, driverv1.Code_CODE_INVALID_ARGUMENT, "uid",
		},
		"no terms": {
			"it could not be fenced [CLAIM-6]", "create",
			func(e *driverv1.Envelope) { e.ClaimTerms = nil }, driverv1.Code_CODE_INVALID_ARGUMENT, "CLAIM-6",
		},
		"no operation id": {
			"a retry could not be distinguished from a new operation", "create",
			func(e *driverv1.Envelope) { e.OperationId = "" }, driverv1.Code_CODE_INVALID_ARGUMENT, "operation id",
		},
		"another operation than the subject": {
			"permissions and audit go by the subject", "delete",
			func(*driverv1.Envelope) {}, driverv1.Code_CODE_INVALID_ARGUMENT, "subject names delete",
		},
		"unknown body": {
			"a body of the future is answered [ENV-4]", "create",
			func(e *driverv1.Envelope) { e.Body = nil }, driverv1.Code_CODE_UNIMPLEMENTED, "create",
		},
		"operation the driver lacks": {
			"a driver answers for what it does not implement", "initialize",
			func(e *driverv1.Envelope) {
				e.Body = &driverv1.Envelope_Initialize{Initialize: &driverv1.InitializeRequest{Machine: e.GetCreate().GetMachine()}}
			}, driverv1.Code_CODE_UNIMPLEMENTED, "initialize",
		},
	}
	r, g := optest.NewRig(t), optest.NewGate(t)
	g.Release()
	rep := r.Replica(t, g.Handle, func(cfg *replica.Config) {
		cfg.Clusters = []string{optest.Cluster, "elsewhere"}
		cfg.Capabilities = []driverv1.Operation{
			driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_DELETE, driverv1.Operation_OPERATION_STATUS,
		}
	})
	s := newSpeaker(t, r)
	// Epoch 7 leads. What another control plane says of this one changes nothing.
	for subject, hello := range map[string]*driverv1.Hello{
		"mcm.v1." + optest.Cluster + ".hello": {Cluster: optest.Cluster, Epoch: 7, Mcm: "a"},
		"mcm.v1.elsewhere.hello":              {Cluster: optest.Cluster, Epoch: 99, Mcm: "b"},
	} {
		s.send(t, subject, "", &driverv1.Envelope{Body: &driverv1.Envelope_Hello{Hello: hello}})
	}
	// The epoch is known once a request of it is taken.
	s.send(t, directed(rep, "create", "m"), s.reply, request(func(e *driverv1.Envelope) { e.Epoch = 7 }))
	s.result(t)
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			env := request(func(e *driverv1.Envelope) { e.Epoch = 7 }, tc.change)
			s.send(t, directed(rep, tc.verb, "m"), s.reply, env)
			frame := bustest.Receive(t, "the refusal", s.frames)
			status := frame.GetResult().GetStatus()
			if status.GetCode() != tc.code || !strings.Contains(status.GetMessage(), tc.text) {
				t.Errorf("answer = %v, want code %v and %q: %s", frame, tc.code, tc.text, tc.reason)
			}
			if frame.GetOperationId() != env.GetOperationId() || frame.GetAttempt() != env.GetAttempt() {
				t.Errorf("answer = %v lacks the request's id and attempt [ENV-5]", frame)
			}
			if epoch := status.GetCode() == driverv1.Code_CODE_ABORTED; frame.GetResult().GetOutcomeUnknown() != epoch {
				t.Errorf("answer = %v: who leads may have the operation done, and of nothing else is the outcome unknown", frame)
			}
			s.send(t, directed(rep, tc.verb, "m"), s.reply, request(func(e *driverv1.Envelope) { e.Epoch, e.Recover, e.Attempt = 7, true, 2 }, tc.change))
			frame = bustest.Receive(t, "the refusal of another attempt", s.frames)
			if want := bus.OperationOf(env) == driverv1.Operation_OPERATION_CREATE; frame.GetResult().GetOutcomeUnknown() != want {
				t.Errorf("answer = %v: a refusal says nothing about what an earlier create made [RESULT-3]", frame)
			}
		})
	}
	env := request(func(e *driverv1.Envelope) { e.Epoch, e.AcceptBy = 7, timestamppb.New(time.Now().Add(-time.Second)) })
	s.send(t, directed(rep, "create", "m"), s.reply, env)
	if frame := bustest.Receive(t, "the refusal", s.frames); frame.GetBusy().GetReason() != driverv1.BusyReason_BUSY_REASON_STALE {
		t.Errorf("answer = %v: a backlog delivered after a pause must not run, and has not failed [ENV-8]", frame)
	}
	if g.Runs.Load() != 1 {
		t.Errorf("ran %d times, want once", g.Runs.Load())
	}
}

// A create that fails before it could look says nothing of what an earlier attempt
// has made: were it taken for a failure, the next one would make a second instance.
func TestFailureBeforeTheLook(t *testing.T) {
	t.Parallel()
	create := func(e *driverv1.Envelope) {}
	remove := func(e *driverv1.Envelope) {
		e.Body = &driverv1.Envelope_Delete{Delete: &driverv1.DeleteRequest{Machine: e.GetCreate().GetMachine()}}
	}
	again := func(e *driverv1.Envelope) { e.Recover, e.Attempt = true, 2 }
	for name, tc := range map[string]struct {
		reason  string
		verb    string
		change  []func(*driverv1.Envelope)
		begins  bool
		unknown bool
	}{
		"first attempt":          {"there is nothing before it", "create", []func(*driverv1.Envelope){create}, false, false},
		"recover":                {"it has not looked", "create", []func(*driverv1.Envelope){create, again}, false, true},
		"recover that has begun": {"it has looked, and its own call failed", "create", []func(*driverv1.Envelope){create, again}, true, false},
		"delete":                 {"the next delete finds what is there", "delete", []func(*driverv1.Envelope){remove, again}, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := optest.NewRig(t)
			rep := r.Replica(t, func(_ context.Context, task *replica.Task) *driverv1.Result {
				if tc.begins {
					if err := task.BeginMutation(); err != nil {
						t.Error(err)
					}
				}

				return &driverv1.Result{Status: &driverv1.Status{Code: driverv1.Code_CODE_UNAVAILABLE, Message: "no class"}}
			})
			s := newSpeaker(t, r)
			s.send(t, directed(rep, tc.verb, "m"), s.reply, request(tc.change...))
			if result := s.result(t); result.GetOutcomeUnknown() != tc.unknown {
				t.Errorf("result = %v, want outcome unknown: %t, as %s [RESULT-3]", result, tc.unknown, tc.reason)
			}
		})
	}
}

func TestReplyOutsideOfTheReplyTreeIsDropped(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	g.Release()
	rep := r.Replica(t, g.Handle)
	s := newSpeaker(t, r)
	for _, reply := range []string{
		"", "_INBOX.x", "mcm.v1." + optest.Cluster + ".driver.other.delete.shop.m", "mcm.v1." + optest.Cluster + ".reply.other.a.b",
		"mcm.v1.other.reply." + optest.Provider + ".a.b",
	} {
		s.send(t, directed(rep, "create", "m"), reply, request())
	}
	s.send(t, directed(rep, "create", "m"), s.reply, request())
	s.result(t)
	if g.Runs.Load() != 1 {
		t.Errorf("ran %d times, want once: the others would have made the replica publish for another party", g.Runs.Load())
	}
}

func TestDuplicateRequestAttaches(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	rep := r.Replica(t, g.Handle)
	s := newSpeaker(t, r)
	env := request()
	for range 3 {
		s.send(t, directed(rep, "create", "m"), s.reply, env)
		if frame := bustest.Receive(t, "a frame", s.frames); frame.GetAccepted() == nil {
			t.Errorf("frame = %v, want accepted", frame)
		}
	}
	env.Attempt, env.ClaimTerms = 2, &driverv1.ClaimTerms{} // another mcm's count
	s.send(t, directed(rep, "create", "m"), s.reply, env)
	if frame := bustest.Receive(t, "a frame", s.frames); frame.GetAccepted() == nil || frame.GetAttempt() != 2 {
		t.Errorf("frame = %v, want accepted for attempt 2", frame)
	}
	g.Release()
	if frame := bustest.Receive(t, "a frame", s.frames); frame.GetResult() == nil || frame.GetAttempt() != 2 {
		t.Errorf("frame = %v, want the result for the last asker", frame)
	}
	if g.Runs.Load() != 1 {
		t.Errorf("ran %d times, want once", g.Runs.Load())
	}
}

func TestDeniedAttemptIsNotTakenLater(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	g.Release()
	rep := r.Replica(t, g.Handle)
	s := newSpeaker(t, r)
	env := request()
	ops := &driverv1.Envelope{OperationId: env.GetOperationId(), Attempt: 1, Body: &driverv1.Envelope_Ops{
		Ops: &driverv1.OpsRequest{OperationId: env.GetOperationId()},
	}}
	s.send(t, strings.TrimSuffix(directed(rep, "ops", "m"), ".shop.m"), s.reply, ops)
	if frame := bustest.Receive(t, "the denial", s.frames); frame.GetOpsHeld() == nil || len(frame.GetOpsHeld().GetOperations()) != 0 {
		t.Fatalf("frame = %v, want a denial", frame)
	}
	s.send(t, directed(rep, "create", "m"), s.reply, env)
	if frame := bustest.Receive(t, "the overtaken request's answer", s.frames); frame.GetBusy() == nil {
		t.Errorf("frame = %v, want busy: mcm counts on it that nothing runs here [OPS-1]", frame)
	}
	env.Attempt = 2
	s.send(t, directed(rep, "create", "m"), s.reply, env)
	if frame := bustest.Receive(t, "the next attempt's answer", s.frames); frame.GetAccepted() == nil {
		t.Errorf("frame = %v, want accepted", frame)
	}
}

func TestJSON(t *testing.T) { //nolint:tparallel // its cases share one replica and one reply subject
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	g.Release()
	rep := r.Replica(t, g.Handle)
	s := newSpeaker(t, r)
	cases := map[string]struct {
		reason, verb, body string
		want               driverv1.Code
	}{
		"read": {
			"people read with what they have at hand", "status",
			`{"operationId":"a","status":{"machine":{"name":"m","uid":"u"}}}`, driverv1.Code_CODE_OK,
		},
		"mutation": {
			"people must not create by accident", "create",
			`{"operationId":"a","create":{"machine":{"name":"m","uid":"u"}}}`, driverv1.Code_CODE_INVALID_ARGUMENT,
		},
		"rubbish": {"people get an answer", "status", `{`, driverv1.Code_CODE_INVALID_ARGUMENT},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			m := nats.NewMsg(directed(rep, tc.verb, "m"))
			m.Reply, m.Data = s.reply, []byte(tc.body)
			m.Header.Set("Content-Type", "application/json")
			if err := s.nc.PublishMsg(m); err != nil {
				t.Fatal(err)
			}
			frame := bustest.Receive(t, "the answer", s.frames)
			if got := frame.GetResult().GetStatus().GetCode(); frame.GetResult() == nil || got != tc.want {
				t.Errorf("answer = %v, want code %v: %s", frame, tc.want, tc.reason)
			}
		})
	}
}

func TestSlowReadIsAccepted(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	rep := r.Replica(t, g.Handle)
	req := optest.Status("m")
	accepted := make(chan string, 1)
	req.OnAccepted = func(_ uint32, replica string) { accepted <- replica }
	done := optest.Call(t.Context(), r.Caller, req)
	if got := bustest.Receive(t, "accepted", accepted); got != rep.Replica() {
		t.Errorf("accepted by %q, want %q", got, rep.Replica())
	}
	g.Release()
	optest.WantOK(t, bustest.Receive(t, "the outcome", done))
	if g.Runs.Load() != 1 {
		t.Errorf("ran %d times, want once: the caller knew who had it", g.Runs.Load())
	}
}

func TestDrain(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	patient := func(cfg *replica.Config) { cfg.DrainTimeout = time.Minute }
	req := optest.Create("m")
	holder, other, done := r.Pair(t, g, req, patient)
	holder.Stop()
	bustest.Eventually(t, "the session says draining", func() bool { return r.Session(holder).GetDraining() })
	s, read := newSpeaker(t, r), optest.Status("old")
	read.Body.OperationId, read.Body.Attempt = read.OperationID, 1
	s.send(t, directed(holder, "status", "old"), s.reply, read.Body) // by a sender with an old session
	if frame := bustest.Receive(t, "the refusal", s.frames); frame.GetBusy().GetReason() != driverv1.BusyReason_BUSY_REASON_DRAINING {
		t.Errorf("frame = %v, want busy for draining", frame)
	}
	var fresh []<-chan optest.Answer // neither mutations nor reads go to it
	for range 2 {
		fresh = append(fresh, optest.Call(t.Context(), r.Caller, optest.Create("new")), optest.Call(t.Context(), r.Caller, optest.Status("new")))
	}
	for range fresh {
		bustest.Receive(t, "the handler", g.Entered)
	}
	g.Release()
	out := optest.WantOK(t, bustest.Receive(t, "the running one's outcome", done))
	for _, ch := range fresh {
		if out := optest.WantOK(t, bustest.Receive(t, "the new one's outcome", ch)); out.Replica != other.Replica() {
			t.Errorf("a draining replica took new work: %+v", out)
		}
	}
	if out.Replica != holder.Replica() || out.Attempts != 1 {
		t.Errorf("outcome = %+v, want the draining replica to finish what it had", out)
	}
	if err := r.Caller.Acknowledge(optest.Provider, out.Replica, req.OperationID); err != nil {
		t.Fatal(err)
	}
	if err := bustest.Receive(t, "Run returns", holder.Done); err != nil {
		t.Errorf("Run: %v", err)
	}
	bustest.Eventually(t, "the replica is known to have stopped", func() bool { return r.Session(holder) == nil })
}

func TestDrainTimeoutCancels(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	rep := r.Replica(t, g.Handle, func(cfg *replica.Config) { cfg.DrainTimeout = 10 * time.Millisecond })
	read, mutation := optest.Call(t.Context(), r.Caller, optest.Status("a")), optest.Call(t.Context(), r.Caller, optest.Create("b"))
	bustest.Receive(t, "the handler", g.Entered)
	bustest.Receive(t, "the handler", g.Entered)
	rep.Stop()
	for _, done := range []<-chan optest.Answer{read, mutation} {
		got := bustest.Receive(t, "the outcome", done)
		optest.WantError(t, got.Err, bus.OriginDriver, driverv1.Code_CODE_CANCELED)
	}
	if err := bustest.Receive(t, "Run returns", rep.Done); err != nil {
		t.Errorf("Run: %v", err)
	}
}

// What ignores its cancelled context is left behind, and Run says so.
func TestDrainLeavesBehind(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	rep := r.Replica(t, func(ctx context.Context, task *replica.Task) *driverv1.Result {
		return g.Handle(context.WithoutCancel(ctx), task)
	}, func(cfg *replica.Config) { cfg.DrainTimeout, cfg.HardStop = 10*time.Millisecond, 10*time.Millisecond })
	done := optest.Call(t.Context(), r.Caller, optest.Create("b"))
	bustest.Receive(t, "the handler", g.Entered)
	rep.Stop()
	if err := bustest.Receive(t, "Run returns", rep.Done); !errors.Is(err, replica.ErrLeft) {
		t.Errorf("Run: %v, want %v", err, replica.ErrLeft)
	}
	g.Release()
	bustest.Receive(t, "the end of the call", done)
}

// A replica that stops while its provider is at it does not know what comes of
// it, and must not keep others from trying again.
func TestDrainTimeoutLeavesTheOutcomeUnknown(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	rep := r.Replica(t, func(ctx context.Context, task *replica.Task) *driverv1.Result {
		if err := task.BeginMutation(); err != nil {
			t.Error(err)
		}

		return g.Handle(ctx, task)
	}, func(cfg *replica.Config) { cfg.DrainTimeout = 10 * time.Millisecond })
	req := optest.Create("b")
	done := optest.Call(t.Context(), r.Caller, req)
	bustest.Receive(t, "the handler", g.Entered)
	rep.Stop()
	got := bustest.Receive(t, "the outcome", done)
	// Its result and its last session come by two ways; either may be first.
	if bus.OriginOf(got.Err) != bus.OriginTimeout || got.Out.Attempts != 1 {
		t.Errorf("outcome = %+v, %v, want one attempt of unknown outcome", got.Out, got.Err)
	}
	next := optest.NewGate(t)
	next.Release()
	r.Replica(t, next.Handle)
	req.Recover, req.Attempt = true, got.Out.Attempts
	if out := optest.WantOK(t, bustest.Receive(t, "the outcome", optest.Call(t.Context(), r.Caller, req))); out.Attempts != 2 {
		t.Errorf("attempts = %d, want 2", out.Attempts)
	}
	if task := bustest.Receive(t, "the next replica", next.Entered); !task.Request.GetRecover() {
		t.Error("the next attempt had no recover")
	}
}

// An attempt that is cut off before it has looked knows nothing of what the
// attempts before it have done.
func TestCutOffBeforeItHasLookedLeavesTheOutcomeUnknown(t *testing.T) {
	t.Parallel()
	for name, again := range map[string]bool{"a first attempt": false, "a later one": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, g := optest.NewRig(t), optest.NewGate(t)
			rep := r.Replica(t, g.Handle, func(cfg *replica.Config) { cfg.DrainTimeout = 10 * time.Millisecond })
			req := optest.Create("b")
			if again {
				req.Recover, req.Attempt = true, 1
			}
			done := optest.Call(t.Context(), r.Caller, req)
			bustest.Receive(t, "the handler", g.Entered)
			rep.Stop()
			got := bustest.Receive(t, "the outcome", done)
			if !again {
				optest.WantError(t, got.Err, bus.OriginDriver, driverv1.Code_CODE_CANCELED) // nothing was begun, and that is known

				return
			}
			// Its result, its last session and its silence come by three ways; any may be first.
			known := []driverv1.Code{driverv1.Code_CODE_CANCELED, driverv1.Code_CODE_UNAVAILABLE, driverv1.Code_CODE_DEADLINE_EXCEEDED}
			if bus.OriginOf(got.Err) != bus.OriginTimeout || !slices.Contains(known, bus.CodeOf(got.Err)) {
				t.Errorf("error is %v, want an unknown outcome", got.Err)
			}
		})
	}
}

func TestAnnouncements(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	changes := make(chan *driverv1.Changed, 9)
	r.Replica(t, func(context.Context, *replica.Task) *driverv1.Result { return nil }, func(cfg *replica.Config) {
		cfg.OnChanged = func(_ string, change *driverv1.Changed) { changes <- change }
	})
	announcer, err := bus.NewAnnouncer(r.Conn, optest.Cluster)
	if err != nil {
		t.Fatal(err)
	}
	hellos := make(chan *driverv1.Hello, 1)
	watcher := bustest.Connect(t, bus.Config{URLs: []string{r.NATS.URL()}})
	stop, err := bus.WatchHello(watcher, "*", func(h *driverv1.Hello) {
		select {
		case hellos <- h:
		default: // one is enough, and many more may come
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	bustest.Eventually(t, "a hello arrives", func() bool {
		if err := announcer.Hello(&driverv1.Hello{Mcm: "mcm-0", Epoch: 3}); err != nil {
			t.Fatal(err)
		}

		return len(hellos) > 0
	})
	if h := <-hellos; h.GetCluster() != optest.Cluster || h.GetProtocolMax() != 1 || h.GetMcm() != "mcm-0" {
		t.Errorf("hello = %v", h)
	}
	want := &driverv1.Changed{Kind: driverv1.Changed_KIND_SECRET, Reference: &driverv1.ObjectReference{Name: "s"}}
	if err := announcer.Changed(optest.Provider, want); err != nil {
		t.Fatal(err)
	}
	if got := bustest.Receive(t, "the change", changes); got.GetReference().GetName() != "s" {
		t.Errorf("change = %v, want %v", got, want)
	}
	if err := announcer.Audit(&driverv1.Audit{Provider: optest.Provider, Name: "no name"}); err == nil {
		t.Error("an audit of an impossible name gave no error")
	}
}

func TestNewServerRefuses(t *testing.T) {
	t.Parallel()
	can := []driverv1.Operation{driverv1.Operation_OPERATION_CREATE}
	for reason, cfg := range map[string]replica.Config{
		"provider":     {Provider: "a.b", Capabilities: can},
		"cluster":      {Provider: "a", Clusters: []string{"*"}, Capabilities: can},
		"replica":      {Provider: "a", Replica: ">", Capabilities: can},
		"reserved":     {Provider: "a", Replica: "plain", Capabilities: can},
		"slots":        {Provider: "a", Slots: -1, Capabilities: can},
		"capabilities": {Provider: "a"},
	} {
		if _, err := replica.New(nil, cfg, replica.HandlerFunc(nil)); err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("error = %v, want one that names %s", err, reason)
		}
	}
}
