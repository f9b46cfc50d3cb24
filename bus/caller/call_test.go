package caller_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestMutationIsAcceptedProgressesAndEnds(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	rep := r.Replica(t, g.Handle)
	accepted, progress := make(chan string, 9), make(chan string, 9)
	req := optest.Create("m.1")
	req.OnAccepted = func(_ uint32, replica string) { accepted <- replica }
	req.OnProgress = func(line string) { progress <- line }
	done := optest.Call(t.Context(), r.Caller, req)

	if got := bustest.Receive(t, "accepted", accepted); got != rep.Replica() {
		t.Errorf("accepted by %q, want %q", got, rep.Replica())
	}
	task := bustest.Receive(t, "the handler", g.Entered)
	if task.Operation != driverv1.Operation_OPERATION_CREATE || task.Cluster != optest.Cluster || task.Request.GetRecover() {
		t.Errorf("task = %+v, want a first create of cluster %s", task, optest.Cluster)
	}
	task.Progress("booting \xff\n now")
	if got, want := bustest.Receive(t, "progress", progress), "booting \uFFFD  now"; got != want {
		t.Errorf("progress = %q, want %q: one line, and valid text", got, want)
	}
	bustest.Eventually(t, "the session lists the operation", func() bool {
		ops := r.Session(rep).GetOperations()

		return len(ops) == 1 && ops[0].GetOperationId() == req.OperationID && !ops[0].GetSettled() && ops[0].GetName() == "m.1"
	})
	g.Release()
	out := optest.WantOK(t, bustest.Receive(t, "the outcome", done))
	if got := out.Result.GetCreate().GetInstance().GetProviderId(); got != "virtual://m.1" {
		t.Errorf("provider id = %q", got)
	}
	if out.Attempts != 1 || out.Replica != rep.Replica() || out.Plain || out.Took <= 0 {
		t.Errorf("outcome = %+v, want one attempt at %s", out, rep.Replica())
	}
	if err := r.Caller.Acknowledge(optest.Provider, out.Replica, req.OperationID); err != nil {
		t.Fatal(err)
	}
	bustest.Eventually(t, "the session forgets what was acknowledged", func() bool {
		return len(r.Session(rep).GetOperations()) == 0
	})
}

func TestDriverErrorKeepsItsPayload(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	want := &driverv1.Result{
		Status: &driverv1.Status{
			Code: driverv1.Code_CODE_RESOURCE_EXHAUSTED, Message: "quota of vcpus", RetryAfter: durationpb.New(7 * time.Second),
		},
		Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{LastKnownState: "half done"}},
	}
	r.Replica(t, func(context.Context, *replica.Task) *driverv1.Result { return want })
	out, err := r.Caller.Call(t.Context(), optest.Create("m"))
	optest.WantError(t, err, bus.OriginDriver, driverv1.Code_CODE_RESOURCE_EXHAUSTED)
	if !proto.Equal(out.Result, want) {
		t.Errorf("result = %v, want %v", out.Result, want)
	}
	var e *bus.Error
	if !errors.As(err, &e) || e.RetryAfter != 7*time.Second {
		t.Errorf("error %#v lacks the driver's retry after", err)
	}
}

func TestFaultyHandlersAreAnswered(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason  string
		handler replica.HandlerFunc
		request caller.Request
		code    driverv1.Code
		text    string
	}{
		"panic": {
			"a panic is an internal error, and its value stays in the replica's log",
			func(context.Context, *replica.Task) *driverv1.Result { panic("secret value") }, optest.Create("m"), //nolint:forbidigo // a driver that panics
			driverv1.Code_CODE_INTERNAL, "panicked",
		},
		"nil": {
			"no result is an internal error",
			func(context.Context, *replica.Task) *driverv1.Result { return nil }, optest.Status("m"),
			driverv1.Code_CODE_INTERNAL, "no result",
		},
		"text that is not UTF-8": {
			"protobuf does not carry it, and the answer must not get lost",
			func(context.Context, *replica.Task) *driverv1.Result {
				return &driverv1.Result{Status: &driverv1.Status{Code: driverv1.Code_CODE_ABORTED, Message: "bad \xff"}}
			}, optest.Create("m"),
			driverv1.Code_CODE_ABORTED, "bad \uFFFD",
		},
		"payload that is not UTF-8": {
			"protobuf does not carry it, and the answer must not get lost",
			func(context.Context, *replica.Task) *driverv1.Result {
				return &driverv1.Result{Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{LastKnownState: "\xff"}}}
			}, optest.Create("m"),
			driverv1.Code_CODE_INTERNAL, "cannot be sent",
		},
		"result over the server's limit": {
			"an answer that does not fit is an error and no silence",
			func(context.Context, *replica.Task) *driverv1.Result {
				return &driverv1.Result{Payload: &driverv1.Result_Create{
					Create: &driverv1.CreateResponse{LastKnownState: strings.Repeat("x", 5<<20)},
				}}
			}, optest.Create("m"),
			driverv1.Code_CODE_INTERNAL, "too large for the bus",
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := optest.NewRig(t)
			r.Replica(t, tc.handler)
			_, err := r.Caller.Call(t.Context(), tc.request)
			optest.WantError(t, err, bus.OriginDriver, tc.code)
			if !strings.Contains(err.Error(), tc.text) || strings.Contains(err.Error(), "secret value") {
				t.Errorf("error = %q, want one with %q: %s", err, tc.text, tc.reason)
			}
		})
	}
}

// What is not known must stay so, whatever the text: another operation would make
// another instance.
func TestUnknownInBadText(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	r.Replica(t, func(context.Context, *replica.Task) *driverv1.Result {
		return &driverv1.Result{
			Status: &driverv1.Status{Code: driverv1.Code_CODE_UNAVAILABLE, Message: "bad \xff"}, OutcomeUnknown: true,
		}
	})
	_, err := r.Caller.Call(t.Context(), optest.Create("m"))
	optest.WantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_UNAVAILABLE)
}

func TestUnsendableRequest(t *testing.T) {
	t.Parallel()
	big := optest.Create("m")
	big.Body.GetCreate().Machine.LastKnownState = strings.Repeat("x", 5<<20)
	odd := optest.Create("m")
	odd.Body.GetCreate().Machine.LastKnownState = "\xff"
	cases := map[string]struct {
		request caller.Request
		text    string
	}{
		"name":      {optest.Create("no name"), "no name"},
		"too large": {big, "max_payload"},
		"not UTF-8": {odd, "UTF-8"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := optest.NewRig(t).Caller.Call(t.Context(), tc.request)
			optest.WantError(t, err, bus.OriginBus, driverv1.Code_CODE_INVALID_ARGUMENT)
			if !strings.Contains(err.Error(), tc.text) {
				t.Errorf("error = %q, want one with %q: it must not be taken for an outage", err, tc.text)
			}
		})
	}
}

func TestNobodyThenSomebody(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	for name, req := range map[string]caller.Request{"mutation": optest.Create("m"), "read": optest.Status("m")} {
		_, err := r.Caller.Call(t.Context(), req)
		optest.WantError(t, err, bus.OriginBus, driverv1.Code_CODE_UNAVAILABLE)
		if !bus.NothingRan(err) || !strings.Contains(err.Error(), optest.Provider) || !strings.Contains(err.Error(), "start one") {
			t.Errorf("%s: error = %q, want one that names the provider and the remedy", name, err)
		}
	}
	room := r.Caller.Room(optest.Provider)
	g := optest.NewGate(t)
	g.Release()
	r.Replica(t, g.Handle)
	bustest.Receive(t, "room at the new replica", room)
	_, err := r.Caller.Call(t.Context(), optest.Create("m"))
	if err != nil {
		t.Errorf("Call after Room: %v", err)
	}
}

// fill occupies every slot of a replica with machines of their own.
func fill(t *testing.T, r *optest.Rig, rep *optest.Replica, g *optest.Gate, slots int) {
	t.Helper()
	for range slots {
		done := optest.Call(t.Context(), r.Caller, optest.Create("filler"))
		bustest.Receive(t, "a filled slot", g.Entered)
		t.Cleanup(func() { g.Release(); bustest.Receive(t, "a filler's end", done) })
	}
	bustest.Eventually(t, "the session shows taken slots", func() bool {
		return int(r.Session(rep).GetRunning()) == slots
	})
}

func TestBusyGoesElsewhere(t *testing.T) {
	t.Parallel()
	r, full := optest.NewRig(t), optest.NewGate(t)
	one := func(cfg *replica.Config) { cfg.Slots = 1 }
	first := r.Replica(t, full.Handle, one)
	fill(t, r, first, full, 1)

	tap := bustest.Raw(t, r.NATS.URL())
	seen, err := tap.SubscribeSync("mcm.v1." + optest.Cluster + ".driver." + optest.Provider + ".create.*.late")
	if err != nil || tap.Flush() != nil {
		t.Fatal(err)
	}
	_, err = r.Caller.Call(t.Context(), optest.Create("late"))
	optest.WantError(t, err, bus.OriginBus, driverv1.Code_CODE_UNAVAILABLE)
	if err := tap.Flush(); err != nil {
		t.Fatal(err)
	}
	if n, _, _ := seen.Pending(); n != 0 {
		t.Errorf("%d requests were published although all replicas are known to be full", n)
	}

	free := optest.NewGate(t)
	free.Release()
	second := r.Replica(t, free.Handle, func(cfg *replica.Config) { cfg.Slots = 8 })
	for range 8 { // the queue group gives about half of them to the full one
		out := optest.WantOK(t, bustest.Receive(t, "the outcome", optest.Call(t.Context(), r.Caller, optest.Create("m"))))
		if out.Replica != second.Replica() || out.Attempts != 1 {
			t.Errorf("outcome = %+v, want one attempt at the replica with room", out)
		}
	}
}

// A replica that was killed a moment ago still seems to have room.
func TestReadIsNotSentToNobodyAgain(t *testing.T) {
	t.Parallel()
	r, full := optest.NewRig(t), optest.NewGate(t)
	r.Replica(t, full.Handle, func(cfg *replica.Config) { cfg.Slots = 1 })
	first := optest.Call(t.Context(), r.Caller, optest.Status("filler"))
	bustest.Receive(t, "a filled slot", full.Entered)
	raw := bustest.Raw(t, r.NATS.URL())
	ghost, err := bus.Encode(&driverv1.Envelope{Replica: "ghost", Body: &driverv1.Envelope_Session{Session: &driverv1.Session{
		Cluster: optest.Cluster, Provider: optest.Provider, Replica: "ghost", Slots: 8,
		Capabilities: []driverv1.Operation{driverv1.Operation_OPERATION_STATUS},
	}}}, "")
	if err != nil {
		t.Fatal(err)
	}
	haunt(t, func() error { return raw.Publish("mcm.v1."+optest.Cluster+".session."+optest.Provider+".ghost", ghost) })
	bustest.Eventually(t, "the ghost is believed to live", func() bool { return len(r.Caller.Replicas()) == 2 })
	seen, err := raw.SubscribeSync("mcm.v1." + optest.Cluster + ".driver." + optest.Provider + ".status.*.late")
	if err != nil || raw.Flush() != nil {
		t.Fatal(err)
	}

	late := bustest.Receive(t, "the end of a read without room", optest.Call(t.Context(), r.Caller, optest.Status("late")))
	optest.WantError(t, late.Err, bus.OriginBus, driverv1.Code_CODE_UNAVAILABLE)
	if err := raw.Flush(); err != nil {
		t.Fatal(err)
	}
	if n, _, _ := seen.Pending(); n == 0 || n > 3 {
		t.Errorf("the drivers were asked %d times", n)
	}
	full.Release()
	optest.WantOK(t, bustest.Receive(t, "the first read", first))
}

// haunt calls f as often as sessions come, until the test ends.
func haunt(t *testing.T, f func() error) {
	t.Helper()
	often := time.NewTicker(bus.SessionInterval)
	ended := t.Context().Done()
	var running sync.WaitGroup
	t.Cleanup(func() { often.Stop(); running.Wait() })
	running.Go(func() {
		for f() == nil {
			select {
			case <-often.C:
			case <-ended:
				return
			}
		}
	})
}

func TestSecondMutationOfAMachineIsRefused(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	rep := r.Replica(t, g.Handle)
	first := optest.Create("m")
	done := optest.Call(t.Context(), r.Caller, first)
	bustest.Receive(t, "the handler", g.Entered)
	second := first
	second.OperationID = bus.MachineOf(second.Body).GetUid() + ".other.0"
	_, err := r.Caller.Call(t.Context(), second)
	optest.WantError(t, err, bus.OriginBus, driverv1.Code_CODE_ABORTED) // another machine's would have room
	if !strings.Contains(err.Error(), rep.Replica()) {
		t.Errorf("error = %q, want one that names the replica", err)
	}
	g.Release()
	optest.WantOK(t, bustest.Receive(t, "the first outcome", done))
}

func TestReadsHaveSlotsOfTheirOwn(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	rep := r.Replica(t, func(ctx context.Context, task *replica.Task) *driverv1.Result {
		if bus.Mutates(task.Operation) {
			return g.Handle(ctx, task)
		}

		return optest.Created(task)
	}, func(cfg *replica.Config) { cfg.Slots = 1 })
	fill(t, r, rep, g, 1)
	optest.WantOK(t, bustest.Receive(t, "the status", optest.Call(t.Context(), r.Caller, optest.Status("m"))))
}

func TestCancel(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	r.Replica(t, g.Handle)
	req := optest.Create("m")
	accepted := make(chan struct{}, 1)
	req.OnAccepted = func(uint32, string) { accepted <- struct{}{} }
	done := optest.Call(t.Context(), r.Caller, req)
	bustest.Receive(t, "accepted", accepted)
	// At once, before any session could have listed the operation.
	if err := r.Caller.Cancel(optest.Provider, req.OperationID); err != nil {
		t.Fatal(err)
	}
	got := bustest.Receive(t, "the outcome", done)
	optest.WantError(t, got.Err, bus.OriginDriver, driverv1.Code_CODE_CANCELED)
	if err := r.Caller.Cancel(optest.Provider, "unknown"); err != nil {
		t.Errorf("Cancel of an unknown operation: %v", err)
	}
}

// What a provider makes of a call that is cut off halfway nobody can tell, so
// from BeginMutation on it is not cut off.
func TestCancelComesTooLate(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	r.Replica(t, func(ctx context.Context, task *replica.Task) *driverv1.Result {
		if !bus.Mutates(task.Operation) {
			return optest.Created(task)
		}
		if err := task.BeginMutation(); err != nil {
			return &driverv1.Result{Status: bus.StatusOf(err)}
		}

		return g.Handle(ctx, task)
	})
	req := optest.Create("m")
	done := optest.Call(t.Context(), r.Caller, req)
	bustest.Receive(t, "the handler", g.Entered)
	if err := r.Caller.Cancel(optest.Provider, req.OperationID); err != nil {
		t.Fatal(err)
	}
	// Once this is answered the replica has had the cancel.
	if _, err := r.Caller.Call(t.Context(), optest.Status("m2")); err != nil {
		t.Error(err)
	}
	g.Release()
	optest.WantOK(t, bustest.Receive(t, "the outcome", done))
}

func TestBeginMutationAfterACancel(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	r.Replica(t, func(ctx context.Context, task *replica.Task) *driverv1.Result {
		g.Handle(ctx, task)

		return &driverv1.Result{Status: bus.StatusOf(task.BeginMutation())}
	})
	req := optest.Create("m")
	done := optest.Call(t.Context(), r.Caller, req)
	bustest.Receive(t, "the handler", g.Entered)
	bustest.Eventually(t, "the replica is known to hold it", func() bool {
		if err := r.Caller.Cancel(optest.Provider, req.OperationID); err != nil {
			t.Fatal(err)
		}
		select {
		case got := <-done:
			optest.WantError(t, got.Err, bus.OriginDriver, driverv1.Code_CODE_CANCELED)

			return true
		default:
			return false
		}
	})
}

func TestCallEndsWithItsContext(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	r.Replica(t, g.Handle)
	for name, req := range map[string]caller.Request{"mutation": optest.Create("m"), "read": optest.Status("m")} {
		ctx, cancel := context.WithCancel(t.Context())
		done := optest.Call(ctx, r.Caller, req)
		bustest.Receive(t, "the handler", g.Entered)
		cancel()
		if got := bustest.Receive(t, "the outcome", done); !errors.Is(got.Err, context.Canceled) {
			t.Errorf("%s: error = %v, want the context's", name, got.Err)
		}
	}
}

func TestReadTimesOut(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	r.Replica(t, g.Handle)
	req := optest.Status("m")
	req.Timeout = 300 * time.Millisecond
	got := bustest.Receive(t, "the outcome", optest.Call(t.Context(), r.Caller, req))
	if got.Err == nil || bus.CodeOf(got.Err) != driverv1.Code_CODE_DEADLINE_EXCEEDED {
		t.Errorf("error = %v, want DeadlineExceeded", got.Err)
	}
}

// plainDriver answers on the plain tree the way fifty lines in any language
// would.
func plainDriver(t *testing.T, url string, answer func(*driverv1.Envelope) *driverv1.Envelope) {
	t.Helper()
	nc := bustest.Raw(t, url)
	_, err := nc.QueueSubscribe("mcm.v1."+optest.Cluster+".plain."+optest.Provider+".>", "driver", func(m *nats.Msg) {
		req, err := bus.Decode(m.Data, "")
		if err != nil {
			t.Error(err)

			return
		}
		reply := answer(req)
		if reply == nil {
			return
		}
		reply.OperationId, reply.Attempt = req.GetOperationId(), req.GetAttempt()
		payload, err := bus.Encode(reply, "")
		if err != nil || m.Respond(payload) != nil {
			t.Error(err)
		}
	})
	if err != nil || nc.Flush() != nil {
		t.Fatal(err)
	}
}

func TestPlainDriver(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	var asked []string
	lose := true
	req := optest.Create("m")
	instance := &driverv1.Instance{ProviderId: "virtual://m", MachineName: "m", MachineUid: bus.MachineOf(req.Body).GetUid()}
	plainDriver(t, r.NATS.URL(), func(env *driverv1.Envelope) *driverv1.Envelope {
		op := bus.OperationOf(env)
		if op == driverv1.Operation_OPERATION_UNSPECIFIED { // whether it is there
			return &driverv1.Envelope{Body: &driverv1.Envelope_Busy{Busy: &driverv1.Busy{}}}
		}
		asked = append(asked, bus.Verb(op))
		result := &driverv1.Result{}
		switch {
		case op == driverv1.Operation_OPERATION_CREATE && lose:
			lose = false

			return nil // the instance was made, the answer was lost
		case op == driverv1.Operation_OPERATION_LIST:
			result.Payload = &driverv1.Result_List{List: &driverv1.ListResponse{Instances: []*driverv1.Instance{
				{ProviderId: "virtual://other", MachineName: "other", MachineUid: "other"}, instance,
			}}}
		}

		return &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: result}}
	})
	req.Timeout = 300 * time.Millisecond
	out, err := r.Caller.Call(t.Context(), req)
	optest.WantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_DEADLINE_EXCEEDED)
	if out.Attempts != 1 {
		t.Errorf("attempts = %d, want 1: it may have had an effect", out.Attempts)
	}
	req.Recover, req.Attempt, req.Until, req.Timeout = true, out.Attempts, out.Until, time.Minute
	out, err = r.Caller.Call(t.Context(), req)
	if err != nil || !out.Plain || !proto.Equal(out.Result.GetCreate().GetInstance(), instance) {
		t.Errorf("outcome = %+v, %v; want the instance that the lost create made", out, err)
	}
	if diff := cmp.Diff([]string{"create", "list"}, asked); diff != "" {
		t.Errorf("asked (-want +got):\n%s", diff)
	}
}

// What a manager left at a plain driver runs there for its time: its successor sends
// nothing beside it, neither the same operation again nor the next one.
func TestPlainDriverAfterAFailover(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		onlyIfHeld bool
		asked      []string
		reason     string
	}{
		"taken up": {false, []string{"create", "list", "create"}, "it looks and tries again, once the first one's time is over"},
		"given up": {true, []string{"create"}, "a delete may follow, once the first one's time is over"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := optest.NewRig(t)
			first, next := make(chan struct{}, 9), make(chan string, 9)
			ended := make(chan struct{})
			var asked []string
			req := optest.Create("m")
			req.Timeout = 4 * time.Second
			plainDriver(t, r.NATS.URL(), func(env *driverv1.Envelope) *driverv1.Envelope {
				if env.GetBody() == nil { // whether there is a driver
					return unimplemented()
				}
				asked = append(asked, bus.Verb(bus.OperationOf(env)))
				if len(asked) == 1 {
					time.AfterFunc(env.GetTimeout().AsDuration(), func() { close(ended) }) // the cloud does not answer
					first <- struct{}{}

					return nil
				}
				select {
				case <-ended:
				default:
					next <- asked[len(asked)-1]
				}
				result := &driverv1.Result{Payload: &driverv1.Result_List{List: &driverv1.ListResponse{}}}
				if bus.OperationOf(env) == driverv1.Operation_OPERATION_CREATE {
					result = optest.Created(&replica.Task{Request: env, Operation: bus.OperationOf(env)})
				}

				return &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: result}}
			})
			ctx, crash := context.WithCancel(t.Context())
			done := optest.Call(ctx, r.Caller, req)
			bustest.Receive(t, "the first attempt", first)
			crash()
			bustest.Receive(t, "the first manager's end", done)

			successor := optest.NewCaller(t, bustest.Connect(t, bus.Config{URLs: []string{r.NATS.URL()}}), caller.Config{})
			req.Recover, req.Attempt, req.OnlyIfHeld = true, 1, tc.onlyIfHeld
			_, err := successor.Call(t.Context(), req)
			if tc.onlyIfHeld {
				if !errors.Is(err, caller.ErrNotHeld) {
					t.Errorf("error = %v, want ErrNotHeld", err)
				}
			} else if err != nil {
				t.Error(err)
			}
			select {
			case <-ended:
			default:
				t.Errorf("the successor went on beside the first attempt: %s", tc.reason)
			}
			select {
			case verb := <-next:
				t.Errorf("%s came beside the first attempt: %s", verb, tc.reason)
			default:
			}
			if diff := cmp.Diff(tc.asked, asked); diff != "" {
				t.Errorf("asked (-want +got):\n%s", diff)
			}
		})
	}
}

// A plain driver that has answered is not at it any more, whatever it came to.
func TestPlainDriverThatDoesNotKnow(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	first := true
	plainDriver(t, r.NATS.URL(), func(env *driverv1.Envelope) *driverv1.Envelope {
		result := &driverv1.Result{Payload: &driverv1.Result_List{List: &driverv1.ListResponse{}}}
		switch {
		case bus.OperationOf(env) != driverv1.Operation_OPERATION_CREATE:
		case first:
			first = false
			result = &driverv1.Result{Status: &driverv1.Status{Code: driverv1.Code_CODE_UNAVAILABLE}, OutcomeUnknown: true}
		default:
			result = optest.Created(&replica.Task{Request: env, Operation: bus.OperationOf(env)})
		}

		return &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: result}}
	})
	req := optest.Create("m")
	req.Timeout = time.Hour
	out, err := r.Caller.Call(t.Context(), req)
	optest.WantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_UNAVAILABLE)
	req.Recover, req.Attempt, req.Until = true, out.Attempts, out.Until
	optest.WantOK(t, bustest.Receive(t, "the second attempt", optest.Call(t.Context(), r.Caller, req)))
}

func TestPlainDriverThatIsBusy(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	plainDriver(t, r.NATS.URL(), func(*driverv1.Envelope) *driverv1.Envelope {
		return &driverv1.Envelope{Body: &driverv1.Envelope_Busy{Busy: &driverv1.Busy{}}}
	})
	_, err := r.Caller.Call(t.Context(), optest.Create("m"))
	optest.WantError(t, err, bus.OriginBus, driverv1.Code_CODE_UNAVAILABLE)
}
