package bus_test

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
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestMutationIsAcceptedProgressesAndEnds(t *testing.T) {
	t.Parallel()
	r, g := newRig(t), newGate(t)
	rep := r.replica(t, g.handle)
	accepted, progress := make(chan string, 9), make(chan string, 9)
	req := create("m.1")
	req.OnAccepted = func(_ uint32, replica string) { accepted <- replica }
	req.OnProgress = func(line string) { progress <- line }
	done := call(t.Context(), r.caller, req)

	if got := bustest.Receive(t, "accepted", accepted); got != rep.Replica() {
		t.Errorf("accepted by %q, want %q", got, rep.Replica())
	}
	task := bustest.Receive(t, "the handler", g.entered)
	if task.Operation != driverv1.Operation_OPERATION_CREATE || task.Cluster != cluster || task.Request.GetRecover() {
		t.Errorf("task = %+v, want a first create of cluster %s", task, cluster)
	}
	task.Progress("booting \xff\n now")
	if got, want := bustest.Receive(t, "progress", progress), "booting \uFFFD  now"; got != want {
		t.Errorf("progress = %q, want %q: one line, and valid text", got, want)
	}
	bustest.Eventually(t, "the session lists the operation", func() bool {
		ops := r.session(rep).GetOperations()

		return len(ops) == 1 && ops[0].GetOperationId() == req.OperationID && !ops[0].GetSettled() && ops[0].GetName() == "m.1"
	})
	g.release()
	out := wantOK(t, bustest.Receive(t, "the outcome", done))
	if got := out.Result.GetCreate().GetInstance().GetProviderId(); got != "virtual://m.1" {
		t.Errorf("provider id = %q", got)
	}
	if out.Attempts != 1 || out.Replica != rep.Replica() || out.Plain || out.Took <= 0 {
		t.Errorf("outcome = %+v, want one attempt at %s", out, rep.Replica())
	}
	if err := r.caller.Acknowledge(provider, out.Replica, req.OperationID); err != nil {
		t.Fatal(err)
	}
	bustest.Eventually(t, "the session forgets what was acknowledged", func() bool {
		return len(r.session(rep).GetOperations()) == 0
	})
}

func TestDriverErrorKeepsItsPayload(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	want := &driverv1.Result{
		Status: &driverv1.Status{
			Code: driverv1.Code_CODE_RESOURCE_EXHAUSTED, Message: "quota of vcpus", RetryAfter: durationpb.New(7 * time.Second),
		},
		Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{LastKnownState: "half done"}},
	}
	r.replica(t, func(context.Context, *bus.Task) *driverv1.Result { return want })
	out, err := r.caller.Call(t.Context(), create("m"))
	wantError(t, err, bus.OriginDriver, driverv1.Code_CODE_RESOURCE_EXHAUSTED)
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
		handler bus.HandlerFunc
		request bus.Request
		code    driverv1.Code
		text    string
	}{
		"panic": {
			"a panic is an internal error, and its value stays in the replica's log",
			func(context.Context, *bus.Task) *driverv1.Result { panic("secret value") }, create("m"), //nolint:forbidigo // a driver that panics
			driverv1.Code_CODE_INTERNAL, "panicked",
		},
		"nil": {
			"no result is an internal error",
			func(context.Context, *bus.Task) *driverv1.Result { return nil }, status("m"),
			driverv1.Code_CODE_INTERNAL, "nothing",
		},
		"text that is not UTF-8": {
			"protobuf does not carry it, and the answer must not get lost",
			func(context.Context, *bus.Task) *driverv1.Result {
				return &driverv1.Result{Status: &driverv1.Status{Code: driverv1.Code_CODE_ABORTED, Message: "bad \xff"}}
			}, create("m"),
			driverv1.Code_CODE_ABORTED, "bad \uFFFD",
		},
		"payload that is not UTF-8": {
			"protobuf does not carry it, and the answer must not get lost",
			func(context.Context, *bus.Task) *driverv1.Result {
				return &driverv1.Result{Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{LastKnownState: "\xff"}}}
			}, create("m"),
			driverv1.Code_CODE_INTERNAL, "cannot be sent",
		},
		"result over the server's limit": {
			"an answer that does not fit is an error and no silence",
			func(context.Context, *bus.Task) *driverv1.Result {
				return &driverv1.Result{Payload: &driverv1.Result_Create{
					Create: &driverv1.CreateResponse{LastKnownState: strings.Repeat("x", 5<<20)},
				}}
			}, create("m"),
			driverv1.Code_CODE_INTERNAL, "too large for the bus",
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.replica(t, tc.handler)
			_, err := r.caller.Call(t.Context(), tc.request)
			wantError(t, err, bus.OriginDriver, tc.code)
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
	r := newRig(t)
	r.replica(t, func(context.Context, *bus.Task) *driverv1.Result {
		return &driverv1.Result{
			Status: &driverv1.Status{Code: driverv1.Code_CODE_UNAVAILABLE, Message: "bad \xff"}, OutcomeUnknown: true,
		}
	})
	_, err := r.caller.Call(t.Context(), create("m"))
	wantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_UNAVAILABLE)
}

func TestUnsendableRequest(t *testing.T) {
	t.Parallel()
	big := create("m")
	big.Body.GetCreate().Machine.LastKnownState = strings.Repeat("x", 5<<20)
	odd := create("m")
	odd.Body.GetCreate().Machine.LastKnownState = "\xff"
	cases := map[string]struct {
		request bus.Request
		text    string
	}{
		"name":      {create("no name"), "no name"},
		"too large": {big, "max_payload"},
		"not UTF-8": {odd, "UTF-8"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := newRig(t).caller.Call(t.Context(), tc.request)
			wantError(t, err, bus.OriginBus, driverv1.Code_CODE_INVALID_ARGUMENT)
			if !strings.Contains(err.Error(), tc.text) {
				t.Errorf("error = %q, want one with %q: it must not be taken for an outage", err, tc.text)
			}
		})
	}
}

func TestNobodyThenSomebody(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for name, req := range map[string]bus.Request{"mutation": create("m"), "read": status("m")} {
		_, err := r.caller.Call(t.Context(), req)
		wantError(t, err, bus.OriginBus, driverv1.Code_CODE_UNAVAILABLE)
		if !bus.NothingRan(err) || !strings.Contains(err.Error(), provider) || !strings.Contains(err.Error(), "start one") {
			t.Errorf("%s: error = %q, want one that names the provider and the remedy", name, err)
		}
	}
	room := r.caller.Room(provider)
	g := newGate(t)
	g.release()
	r.replica(t, g.handle)
	bustest.Receive(t, "room at the new replica", room)
	_, err := r.caller.Call(t.Context(), create("m"))
	if err != nil {
		t.Errorf("Call after Room: %v", err)
	}
}

// fill occupies every slot of a replica with machines of their own.
func fill(t *testing.T, r *rig, rep *replica, g *gate, slots int) {
	t.Helper()
	for range slots {
		done := call(t.Context(), r.caller, create("filler"))
		bustest.Receive(t, "a filled slot", g.entered)
		t.Cleanup(func() { g.release(); bustest.Receive(t, "a filler's end", done) })
	}
	bustest.Eventually(t, "the session tells that slots are taken", func() bool {
		return int(r.session(rep).GetRunning()) == slots
	})
}

func TestBusyGoesElsewhere(t *testing.T) {
	t.Parallel()
	r, full := newRig(t), newGate(t)
	one := func(cfg *bus.ServerConfig) { cfg.Slots = 1 }
	first := r.replica(t, full.handle, one)
	fill(t, r, first, full, 1)

	tap := bustest.Raw(t, r.srv.URL())
	seen, err := tap.SubscribeSync("mcm.v1." + cluster + ".driver." + provider + ".create.*.late")
	if err != nil || tap.Flush() != nil {
		t.Fatal(err)
	}
	_, err = r.caller.Call(t.Context(), create("late"))
	wantError(t, err, bus.OriginBus, driverv1.Code_CODE_UNAVAILABLE)
	if err := tap.Flush(); err != nil {
		t.Fatal(err)
	}
	if n, _, _ := seen.Pending(); n != 0 {
		t.Errorf("%d requests were published although all replicas are known to be full", n)
	}

	free := newGate(t)
	free.release()
	second := r.replica(t, free.handle, func(cfg *bus.ServerConfig) { cfg.Slots = 8 })
	for range 8 { // the queue group gives about half of them to the full one
		out := wantOK(t, bustest.Receive(t, "the outcome", call(t.Context(), r.caller, create("m"))))
		if out.Replica != second.Replica() || out.Attempts != 1 {
			t.Errorf("outcome = %+v, want one attempt at the replica with room", out)
		}
	}
}

// A replica that was killed a moment ago still seems to have room.
func TestReadIsNotSentToNobodyAgain(t *testing.T) {
	t.Parallel()
	r, full := newRig(t), newGate(t)
	r.replica(t, full.handle, func(cfg *bus.ServerConfig) { cfg.Slots = 1 })
	first := call(t.Context(), r.caller, status("filler"))
	bustest.Receive(t, "a filled slot", full.entered)
	raw := bustest.Raw(t, r.srv.URL())
	ghost, err := bus.Encode(&driverv1.Envelope{Replica: "ghost", Body: &driverv1.Envelope_Session{Session: &driverv1.Session{
		Cluster: cluster, Provider: provider, Replica: "ghost", Slots: 8,
		Capabilities: []driverv1.Operation{driverv1.Operation_OPERATION_STATUS},
	}}}, "")
	if err != nil {
		t.Fatal(err)
	}
	haunt(t, func() error { return raw.Publish("mcm.v1."+cluster+".session."+provider+".ghost", ghost) })
	bustest.Eventually(t, "the ghost is believed to live", func() bool { return len(r.caller.Replicas()) == 2 })
	seen, err := raw.SubscribeSync("mcm.v1." + cluster + ".driver." + provider + ".status.*.late")
	if err != nil || raw.Flush() != nil {
		t.Fatal(err)
	}

	late := bustest.Receive(t, "the end of a read that nobody has room for", call(t.Context(), r.caller, status("late")))
	wantError(t, late.err, bus.OriginBus, driverv1.Code_CODE_UNAVAILABLE)
	if err := raw.Flush(); err != nil {
		t.Fatal(err)
	}
	if n, _, _ := seen.Pending(); n == 0 || n > 3 {
		t.Errorf("the drivers were asked %d times", n)
	}
	full.release()
	wantOK(t, bustest.Receive(t, "the first read", first))
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
	r, g := newRig(t), newGate(t)
	rep := r.replica(t, g.handle)
	first := create("m")
	done := call(t.Context(), r.caller, first)
	bustest.Receive(t, "the handler", g.entered)
	second := first
	second.OperationID = bus.MachineOf(second.Body).GetUid() + ".other.0"
	_, err := r.caller.Call(t.Context(), second)
	wantError(t, err, bus.OriginBus, driverv1.Code_CODE_ABORTED) // another machine's would have room
	if !strings.Contains(err.Error(), rep.Replica()) {
		t.Errorf("error = %q, want one that names the replica", err)
	}
	g.release()
	wantOK(t, bustest.Receive(t, "the first outcome", done))
}

func TestReadsHaveSlotsOfTheirOwn(t *testing.T) {
	t.Parallel()
	r, g := newRig(t), newGate(t)
	rep := r.replica(t, func(ctx context.Context, task *bus.Task) *driverv1.Result {
		if bus.Mutates(task.Operation) {
			return g.handle(ctx, task)
		}

		return created(task)
	}, func(cfg *bus.ServerConfig) { cfg.Slots = 1 })
	fill(t, r, rep, g, 1)
	wantOK(t, bustest.Receive(t, "the status", call(t.Context(), r.caller, status("m"))))
}

func TestCancel(t *testing.T) {
	t.Parallel()
	r, g := newRig(t), newGate(t)
	r.replica(t, g.handle)
	req := create("m")
	accepted := make(chan struct{}, 1)
	req.OnAccepted = func(uint32, string) { accepted <- struct{}{} }
	done := call(t.Context(), r.caller, req)
	bustest.Receive(t, "accepted", accepted)
	// At once, before any session could have listed the operation.
	if err := r.caller.Cancel(provider, req.OperationID); err != nil {
		t.Fatal(err)
	}
	got := bustest.Receive(t, "the outcome", done)
	wantError(t, got.err, bus.OriginDriver, driverv1.Code_CODE_CANCELED)
	if err := r.caller.Cancel(provider, "unknown"); err != nil {
		t.Errorf("Cancel of an unknown operation: %v", err)
	}
}

// What a provider makes of a call that is cut off halfway nobody can tell, so
// from BeginMutation on it is not cut off.
func TestCancelComesTooLate(t *testing.T) {
	t.Parallel()
	r, g := newRig(t), newGate(t)
	r.replica(t, func(ctx context.Context, task *bus.Task) *driverv1.Result {
		if !bus.Mutates(task.Operation) {
			return created(task)
		}
		if err := task.BeginMutation(); err != nil {
			return &driverv1.Result{Status: bus.StatusOf(err)}
		}

		return g.handle(ctx, task)
	})
	req := create("m")
	done := call(t.Context(), r.caller, req)
	bustest.Receive(t, "the handler", g.entered)
	if err := r.caller.Cancel(provider, req.OperationID); err != nil {
		t.Fatal(err)
	}
	// Once this is answered the replica has had the cancel.
	if _, err := r.caller.Call(t.Context(), status("m2")); err != nil {
		t.Error(err)
	}
	g.release()
	wantOK(t, bustest.Receive(t, "the outcome", done))
}

func TestBeginMutationAfterACancel(t *testing.T) {
	t.Parallel()
	r, g := newRig(t), newGate(t)
	r.replica(t, func(ctx context.Context, task *bus.Task) *driverv1.Result {
		g.handle(ctx, task)

		return &driverv1.Result{Status: bus.StatusOf(task.BeginMutation())}
	})
	req := create("m")
	done := call(t.Context(), r.caller, req)
	bustest.Receive(t, "the handler", g.entered)
	bustest.Eventually(t, "the replica is known to hold it", func() bool {
		if err := r.caller.Cancel(provider, req.OperationID); err != nil {
			t.Fatal(err)
		}
		select {
		case got := <-done:
			wantError(t, got.err, bus.OriginDriver, driverv1.Code_CODE_CANCELED)

			return true
		default:
			return false
		}
	})
}

func TestCallEndsWithItsContext(t *testing.T) {
	t.Parallel()
	r, g := newRig(t), newGate(t)
	r.replica(t, g.handle)
	for name, req := range map[string]bus.Request{"mutation": create("m"), "read": status("m")} {
		ctx, cancel := context.WithCancel(t.Context())
		done := call(ctx, r.caller, req)
		bustest.Receive(t, "the handler", g.entered)
		cancel()
		if got := bustest.Receive(t, "the outcome", done); !errors.Is(got.err, context.Canceled) {
			t.Errorf("%s: error = %v, want the context's", name, got.err)
		}
	}
}

func TestReadTimesOut(t *testing.T) {
	t.Parallel()
	r, g := newRig(t), newGate(t)
	r.replica(t, g.handle)
	req := status("m")
	req.Timeout = 300 * time.Millisecond
	got := bustest.Receive(t, "the outcome", call(t.Context(), r.caller, req))
	if got.err == nil || bus.CodeOf(got.err) != driverv1.Code_CODE_DEADLINE_EXCEEDED {
		t.Errorf("error = %v, want DeadlineExceeded", got.err)
	}
}

// plainDriver answers on the plain tree the way fifty lines in any language
// would.
func plainDriver(t *testing.T, url string, answer func(*driverv1.Envelope) *driverv1.Envelope) {
	t.Helper()
	nc := bustest.Raw(t, url)
	_, err := nc.QueueSubscribe("mcm.v1."+cluster+".plain."+provider+".>", "driver", func(m *nats.Msg) {
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
	r := newRig(t)
	var asked []string
	lose := true
	req := create("m")
	instance := &driverv1.Instance{ProviderId: "virtual://m", MachineName: "m", MachineUid: bus.MachineOf(req.Body).GetUid()}
	plainDriver(t, r.srv.URL(), func(env *driverv1.Envelope) *driverv1.Envelope {
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
	out, err := r.caller.Call(t.Context(), req)
	wantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_DEADLINE_EXCEEDED)
	if out.Attempts != 1 {
		t.Errorf("attempts = %d, want 1: it may have had an effect", out.Attempts)
	}
	req.Recover, req.Attempt, req.Until, req.Timeout = true, out.Attempts, out.Until, time.Minute
	out, err = r.caller.Call(t.Context(), req)
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
			r := newRig(t)
			first, next := make(chan struct{}, 9), make(chan string, 9)
			ended := make(chan struct{})
			var asked []string
			req := create("m")
			req.Timeout = 4 * time.Second
			plainDriver(t, r.srv.URL(), func(env *driverv1.Envelope) *driverv1.Envelope {
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
					result = created(&bus.Task{Request: env, Operation: bus.OperationOf(env)})
				}

				return &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: result}}
			})
			ctx, crash := context.WithCancel(t.Context())
			done := call(ctx, r.caller, req)
			bustest.Receive(t, "the first attempt", first)
			crash()
			bustest.Receive(t, "the first manager's end", done)

			successor := newCaller(t, bustest.Connect(t, bus.Config{URLs: []string{r.srv.URL()}}), bus.CallerConfig{})
			req.Recover, req.Attempt, req.OnlyIfHeld = true, 1, tc.onlyIfHeld
			_, err := successor.Call(t.Context(), req)
			if tc.onlyIfHeld {
				if !errors.Is(err, bus.ErrNotHeld) {
					t.Errorf("error = %v, want that nobody holds it", err)
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
	r := newRig(t)
	first := true
	plainDriver(t, r.srv.URL(), func(env *driverv1.Envelope) *driverv1.Envelope {
		result := &driverv1.Result{Payload: &driverv1.Result_List{List: &driverv1.ListResponse{}}}
		switch {
		case bus.OperationOf(env) != driverv1.Operation_OPERATION_CREATE:
		case first:
			first = false
			result = &driverv1.Result{Status: &driverv1.Status{Code: driverv1.Code_CODE_UNAVAILABLE}, OutcomeUnknown: true}
		default:
			result = created(&bus.Task{Request: env, Operation: bus.OperationOf(env)})
		}

		return &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: result}}
	})
	req := create("m")
	req.Timeout = time.Hour
	out, err := r.caller.Call(t.Context(), req)
	wantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_UNAVAILABLE)
	req.Recover, req.Attempt, req.Until = true, out.Attempts, out.Until
	wantOK(t, bustest.Receive(t, "the second attempt", call(t.Context(), r.caller, req)))
}

func TestPlainDriverThatIsBusy(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	plainDriver(t, r.srv.URL(), func(*driverv1.Envelope) *driverv1.Envelope {
		return &driverv1.Envelope{Body: &driverv1.Envelope_Busy{Busy: &driverv1.Busy{}}}
	})
	_, err := r.caller.Call(t.Context(), create("m"))
	wantError(t, err, bus.OriginBus, driverv1.Code_CODE_UNAVAILABLE)
}
