package driversdk

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestServe_Create(t *testing.T) {
	t.Parallel()
	d := &testDriver{}
	w := start(t, d, nil)
	class := &driverv1.ClassReference{
		Class:             w.store.setClass("small", "1", `{"size":"s","tags":{"a":"b"}}`),
		Secret:            w.store.setSecret("user", "1", map[string]string{"userData": "token <<BOOTSTRAP_TOKEN>>", "region": "from-user", "key": "user-key"}),
		CredentialsSecret: w.store.setSecret("creds", "1", map[string]string{"key": "creds-key"}),
	}
	w.store.bootstrap["<<BOOTSTRAP_TOKEN>>"] = "abcdef.0123456789"

	body := create(machine("m1"), class)
	body.Owner = "owner-uid"
	e := w.ask(body)
	if first := e.frame(); first.GetAccepted() == nil {
		t.Errorf("first frame [ACCEPT-1]: want accepted, have %v", first)
	}
	want := &driverv1.Result{Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{Instance: &driverv1.Instance{
		ProviderId: "acme://m1", NodeName: "m1", MachineName: "m1", MachineUid: "uid-m1", Owner: "owner-uid",
		Addresses: []*driverv1.Address{{Type: "InternalIP", Address: "10.0.0.1"}},
	}}}}
	if diff := cmp.Diff(want, e.result(), protocmp.Transform()); diff != "" {
		t.Errorf("result (-want +got):\n%s", diff)
	}

	req := d.last(t)
	if diff := cmp.Diff(testSpec{Size: "s", Tags: map[string]string{"a": "b"}}, req.Class.Spec); diff != "" {
		t.Errorf("decoded spec (-want +got):\n%s", diff)
	}
	secret := map[string]string{}
	for key, value := range req.Class.Secret {
		secret[key] = string(value)
	}
	if diff := cmp.Diff(map[string]string{
		"userData": "token <<BOOTSTRAP_TOKEN>>", "region": "from-user", "key": "creds-key",
	}, secret); diff != "" {
		t.Errorf("merged secret: credentials win (-want +got):\n%s", diff)
	}
	if got, want := string(req.UserData), "token abcdef.0123456789"; got != want {
		t.Errorf("user data: want %q, have %q", want, got)
	}
	if req.OperationID != e.id || req.Attempt != 1 || req.Cluster != testCluster {
		t.Errorf("request: have operation %q attempt %d of cluster %q", req.OperationID, req.Attempt, req.Cluster)
	}
}

func TestServe_Failures(t *testing.T) {
	t.Parallel()
	const good = `{"size":"s"}`
	cases := map[string]struct {
		reason   string
		spec     string
		noClass  bool
		noSecret bool
		onCreate func(ctx context.Context, req *Request[testSpec]) (*Instance, error)
		timeout  time.Duration
		code     Code
		message  string
		state    string // last known state
		unknown  bool   // so is its outcome
	}{
		"unknown field": {
			reason: "a misspelt field is named, not ignored",
			spec:   `{"size":"s","tgas":{}}`, code: InvalidArgument,
			message: "class ns/c: unknown field providerSpec.tgas: it is misspelt, or belongs to another version of the driver",
		},
		"own validation": {
			reason: "the spec's Validate has the last word",
			spec:   `{}`, code: InvalidArgument, message: "class ns/c: providerSpec: size is missing",
		},
		"class is gone": {
			reason:  "a class that is gone must not look like a machine that is gone",
			noClass: true, code: FailedPrecondition, message: `the manager refused class ns/c: no class "c"`,
		},
		"secret is gone": {
			reason: "as for a class",
			spec:   good, noSecret: true, code: FailedPrecondition, message: `the manager refused secret ns/s: no secret "s"`,
		},
		"coded error with a state": {
			reason: "a failure carries last known state too",
			spec:   good,
			onCreate: func(_ context.Context, req *Request[testSpec]) (*Instance, error) {
				req.SetLastKnownState("half way")

				return nil, Errorf(ResourceExhausted, "no more %s", req.Class.Spec.Size)
			},
			code: ResourceExhausted, message: "no more s", state: "half way",
		},
		"error without a code": {
			reason:   "what is not known is tried again soon",
			spec:     good,
			onCreate: func(context.Context, *Request[testSpec]) (*Instance, error) { return nil, errors.New("odd") },
			code:     Unknown, message: "odd",
		},
		"panic": {
			reason: "one operation's panic is its own",
			spec:   good,
			onCreate: func(context.Context, *Request[testSpec]) (*Instance, error) {
				panic("at the disco") //nolint:forbidigo // what the test is about
			},
			code: Internal, unknown: true,
		},
		"panic before the cloud is asked": {
			reason: "nothing was begun", spec: `{"size":"panic"}`, code: Internal,
		},
		"no provider id": {
			reason:   "INSTANCE-1",
			spec:     good,
			onCreate: func(context.Context, *Request[testSpec]) (*Instance, error) { return &Instance{NodeName: "n"}, nil },
			code:     Internal, message: "driver returned an instance without a provider id from Create [INSTANCE-1]", unknown: true,
		},
		"nothing at all": {
			reason:   "neither an instance nor an error",
			spec:     good,
			onCreate: func(context.Context, *Request[testSpec]) (*Instance, error) { return nil, nil },
			code:     Internal, message: "driver returned neither an instance nor an error from Create", unknown: true,
		},
		"deadline": {
			reason: "CREATE-4, also when the client library hides that its context ended",
			spec:   good,
			onCreate: func(ctx context.Context, req *Request[testSpec]) (*Instance, error) {
				<-ctx.Done()
				if err := req.BeginMutation(context.WithoutCancel(ctx)); CodeOf(err) != DeadlineExceeded {
					return nil, Errorf(Internal, "BeginMutation after the deadline: %v", err)
				}

				return nil, errors.New("i/o timeout")
			},
			timeout: 50 * time.Millisecond,
			code:    DeadlineExceeded, message: "i/o timeout", unknown: true,
		},
		"secret in the text": {
			reason: "a cloud that quotes the credentials must not publish them",
			spec:   good,
			onCreate: func(_ context.Context, req *Request[testSpec]) (*Instance, error) {
				return nil, Errorf(Unauthenticated, "token %s refused", req.Class.Secret["token"])
			},
			code: Unauthenticated, message: "token [redacted] refused",
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := start(t, &testDriver{onCreate: tc.onCreate}, nil)
			class := &driverv1.ClassReference{Class: w.store.setClass("c", "1", tc.spec)}
			class.Secret = w.store.setSecret("s", "1", map[string]string{"token": "correct-horse-battery"})
			if tc.noClass {
				delete(w.store.classes, "c")
			}
			if tc.noSecret {
				delete(w.store.secrets, "s")
			}
			env := create(machine("m1"), class)
			if tc.timeout > 0 {
				env.Timeout = durationpb.New(tc.timeout)
			}
			result := w.ask(env).result()
			if got := result.GetStatus().GetCode(); got != tc.code {
				t.Errorf("%s: want code %v, have %v (%s)", tc.reason, tc.code, got, result.GetStatus().GetMessage())
			}
			if got := result.GetStatus().GetMessage(); tc.message != "" && got != tc.message {
				t.Errorf("%s: want message %q, have %q", tc.reason, tc.message, got)
			}
			if got := result.GetCreate().GetLastKnownState(); got != tc.state {
				t.Errorf("%s: want last known state %q, have %q", tc.reason, tc.state, got)
			}
			if got := result.GetOutcomeUnknown(); got != tc.unknown {
				t.Errorf("%s: want outcome unknown %t, have %t", tc.reason, tc.unknown, got)
			}
		})
	}
}

func TestServe_PanicLog(t *testing.T) {
	t.Parallel()
	var log lockedBuffer
	w := start(t, &testDriver{onCreate: func(_ context.Context, req *Request[testSpec]) (*Instance, error) {
		panic("refused: " + string(req.Class.Secret["token"])) //nolint:forbidigo // what the test is about
	}}, func(c *Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
	class := &driverv1.ClassReference{
		Class:  w.store.setClass("c", "1", `{"size":"s"}`),
		Secret: w.store.setSecret("s", "1", map[string]string{"token": "correct-horse-battery"}),
	}
	w.ask(create(machine("m1"), class)).result()
	text := log.String()
	if !strings.Contains(text, "refused: [redacted]") || strings.Contains(text, "correct-horse") {
		t.Errorf("want the panic without the secret in the log, have:\n%s", text)
	}
	if !strings.Contains(text, "TestServe_PanicLog.func1") {
		t.Errorf("want the driver's method in the logged stack, have:\n%s", text)
	}
}

func TestServe_Recover(t *testing.T) {
	t.Parallel()
	own := &Instance{ProviderID: "acme://1", MachineName: "m1", MachineUID: "uid-m1"}
	cases := map[string]struct {
		reason  string
		exist   []*Instance
		creates int
		want    string
	}{
		"made already":  {"the first attempt's instance is returned [ENV-9]", []*Instance{own}, 0, "acme://1"},
		"nothing there": {"then it is created", nil, 1, "acme://m1"},
		"somebody else's": {
			"an instance of that name with another uid is not ours",
			[]*Instance{{ProviderID: "acme://2", MachineName: "m1", MachineUID: "other"}},
			1, "acme://m1",
		},
		"two": {
			"the driver sorts out several",
			[]*Instance{own, {ProviderID: "acme://3", MachineName: "m1", MachineUID: "uid-m1"}},
			1, "acme://m1",
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := &testDriver{instances: tc.exist}
			w := start(t, d, nil)
			env := create(machine("m1"), &driverv1.ClassReference{Class: w.store.setClass("c", "1", `{"size":"s"}`)})
			env.Recover, env.Attempt = true, 2
			result := w.ask(env).result()
			if got := result.GetCreate().GetInstance().GetProviderId(); got != tc.want || result.GetStatus().GetCode() != OK {
				t.Errorf("%s: want %s, have %v", tc.reason, tc.want, result)
			}
			d.mu.Lock()
			defer d.mu.Unlock()
			if d.creates != tc.creates {
				t.Errorf("%s: want %d calls of Create, have %d", tc.reason, tc.creates, d.creates)
			}
		})
	}
}

func TestServe_Reads(t *testing.T) {
	t.Parallel()
	d := &testDriver{instances: []*Instance{{ProviderID: "acme://1", MachineName: "m1", MachineUID: "uid-m1"}}}
	w := start(t, d, nil)
	class := &driverv1.ClassReference{Class: w.store.setClass("c", "1", `{"size":"s"}`)}

	if got := w.ask(status(machine("m1"), class)).result(); got.GetInstanceStatus().GetInstance().GetProviderId() != "acme://1" {
		t.Errorf("status of a machine with an instance: have %v", got)
	}
	if got := w.ask(status(machine("m2"), class)).result(); got.GetStatus().GetCode() != NotFound {
		t.Errorf("status of a machine without one [STATUS-2]: have %v", got)
	}
	list := &driverv1.Envelope{OperationId: "l", Body: &driverv1.Envelope_List{List: &driverv1.ListRequest{Class: class}}}
	if got := w.ask(list).result().GetList().GetInstances(); len(got) != 1 || got[0].GetMachineName() != "m1" {
		t.Errorf("list: have %v", got)
	}
	valid := &driverv1.Envelope{OperationId: "v", Body: &driverv1.Envelope_Validate{Validate: &driverv1.ValidateRequest{Class: class}}}
	if got := w.ask(valid).result(); got.GetStatus().GetCode() != OK {
		t.Errorf("validate a good class: have %v", got)
	}
	class = &driverv1.ClassReference{Class: w.store.setClass("c", "2", `{"size":7}`)}
	faulty := &driverv1.Envelope{OperationId: "f", Body: &driverv1.Envelope_Validate{Validate: &driverv1.ValidateRequest{Class: class}}}
	if got := w.ask(faulty).result().GetStatus(); got.GetMessage() != "class ns/c: providerSpec.size: want string, have number" {
		t.Errorf("validate a faulty class [VALIDATE-2]: have %v", got)
	}
	d.mu.Lock()
	d.instances = append(d.instances, &Instance{ProviderID: "acme://2"})
	d.mu.Unlock()
	class = &driverv1.ClassReference{Class: w.store.setClass("c", "3", `{"size":"s"}`)}
	list = &driverv1.Envelope{OperationId: "l2", Body: &driverv1.Envelope_List{List: &driverv1.ListRequest{Class: class}}}
	if got := w.ask(list).result().GetStatus(); got.GetCode() != Internal {
		t.Errorf("an instance without a machine name is listed [INSTANCE-2]: have %v", got)
	}
}

func TestServe_Capabilities(t *testing.T) {
	t.Parallel()
	w := start(t, &testDriver{}, func(c *Config) {
		c.Kind, c.APIVersions, c.CreateIdentity, c.Version = "K", []string{"a/v1"}, IdentityToken, "1.2.3"
	})
	got := w.session(func(*driverv1.Session) bool { return true })
	want := &driverv1.Session{
		Version: "1.2.3", Kind: "K", ApiVersions: []string{"a/v1"}, Slots: uint32(replica.DefaultSlots()), CreateIdentity: IdentityToken,
		Capabilities: []driverv1.Operation{
			driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_DELETE, driverv1.Operation_OPERATION_STATUS,
			driverv1.Operation_OPERATION_LIST, driverv1.Operation_OPERATION_VALIDATE,
		},
	}
	ignore := protocmp.IgnoreFields(&driverv1.Session{}, "cluster", "provider", "replica", "sequence", "started_at", "protocol", "protocol_min", "hostname")
	if diff := cmp.Diff(want, got, protocmp.Transform(), ignore); diff != "" {
		t.Errorf("session (-want +got):\n%s", diff)
	}
}

// blocking is a driver whose creates wait for release or for their context.
func blocking() (d *testDriver, started chan string, release chan struct{}) {
	started, release = make(chan string, 10), make(chan struct{})
	d = &testDriver{onCreate: func(ctx context.Context, req *Request[testSpec]) (*Instance, error) {
		req.Progress("waiting")
		started <- req.Machine.Name
		select {
		case <-release:
			return &Instance{ProviderID: "acme://" + req.Machine.Name}, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}}

	return d, started, release
}

func TestServe_Busy(t *testing.T) {
	t.Parallel()
	d, started, release := blocking()
	w := start(t, d, func(c *Config) { c.Slots = 1 })
	class := &driverv1.ClassReference{Class: w.store.setClass("c", "1", `{"size":"s"}`)}
	first := w.ask(create(machine("m1"), class))
	<-started
	if got := w.ask(create(machine("m2"), class)).frame().GetBusy().GetReason(); got != driverv1.BusyReason_BUSY_REASON_SLOTS {
		t.Errorf("a create without a slot: want busy for slots, have %v", got)
	}
	if got := w.ask(status(machine("m1"), class)).result().GetStatus().GetCode(); got != NotFound {
		t.Errorf("a read has a slot of its own: want %v, have %v", NotFound, got)
	}
	close(release)
	if got := first.result().GetCreate().GetInstance().GetProviderId(); got != "acme://m1" {
		t.Errorf("the running create goes on: have %q", got)
	}
	if got := w.ask(create(machine("m2"), class)).result().GetStatus().GetCode(); got != OK {
		t.Errorf("the slot is free again: have %v", got)
	}
}

func TestServe_Drain(t *testing.T) {
	t.Parallel()
	d, started, release := blocking()
	w := start(t, d, nil)
	class := &driverv1.ClassReference{Class: w.store.setClass("c", "1", `{"size":"s"}`)}
	running := w.ask(create(machine("m1"), class))
	<-started
	w.stop()
	w.session(func(s *driverv1.Session) bool { return s.GetDraining() })
	if err := w.replica.health.ready(); err == nil {
		t.Error("a draining replica says it is ready")
	}
	select {
	case err := <-w.served:
		t.Fatalf("Serve returned with a create running: %v", err)
	default:
	}
	close(release)
	if got := running.result().GetCreate().GetInstance(); got.GetProviderId() != "acme://m1" || got.GetMachineUid() != "uid-m1" {
		t.Errorf("the create that ran at the stop signal: have %v", got)
	}
	err := <-w.served
	w.served <- err // for the clean-up
	if err != nil {
		t.Errorf("Serve: %v", err)
	}
	w.session(func(s *driverv1.Session) bool { return s.GetStopped() })
}

func TestServe_HardStop(t *testing.T) {
	t.Parallel()
	d, started, _ := blocking()
	w := start(t, d, nil)
	class := &driverv1.ClassReference{Class: w.store.setClass("c", "1", `{"size":"s"}`)}
	running := w.ask(create(machine("m1"), class))
	<-started
	w.stop()
	w.session(func(s *driverv1.Session) bool { return s.GetDraining() })
	w.replica.second <- os.Interrupt
	if got, _ := running.end(); got.GetStatus().GetCode() != Canceled || !got.GetOutcomeUnknown() {
		t.Errorf("a create at the hard stop: want %v with an unknown outcome, have %v", Canceled, got)
	}
	err := <-w.served
	w.served <- err
	if err != nil {
		t.Errorf("Serve: %v", err)
	}
}

// Whatever cancels them, operations that go on all the same are left behind, and Serve
// says so.
func TestServe_LeftBehind(t *testing.T) {
	t.Parallel()
	for name, stop := range map[string]func(*world){
		"drain timeout": func(*world) {},
		"second signal": func(w *world) { w.replica.second <- os.Interrupt },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, started, release := blocking()
			defer close(release)
			wait := d.onCreate
			d.onCreate = func(ctx context.Context, req *Request[testSpec]) (*Instance, error) {
				return wait(context.WithoutCancel(ctx), req)
			}
			w := start(t, d, func(c *Config) {
				c.hardStop = 10 * time.Millisecond
				if name == "drain timeout" {
					c.DrainTimeout = 10 * time.Millisecond
				}
			})
			w.ask(create(machine("m1"), &driverv1.ClassReference{Class: w.store.setClass("c", "1", `{"size":"s"}`)}))
			<-started
			w.stop()
			stop(w)
			err := <-w.served
			w.served <- err // for the clean-up
			if !errors.Is(err, errLeft) {
				t.Errorf("Serve: %v, want %v", err, errLeft)
			}
		})
	}
}

// From BeginMutation on an operation cannot be called off, and what cuts it off
// leaves the outcome unknown.
func TestServe_Outcome(t *testing.T) {
	t.Parallel()
	type ended struct {
		Code    Code
		Unknown bool
	}
	refused := Errorf(ResourceExhausted, "quota")
	cases := map[string]struct {
		reason string
		err    error // what Create returns when it is let go
		drain  time.Duration
		end    func(w *world, e *exchange, release chan struct{})
		want   ended
	}{
		"cancelled": {
			reason: "a cancel comes too late for a create that has begun",
			end: func(w *world, e *exchange, release chan struct{}) {
				w.directed(w.replica.name, "cancel", "", &driverv1.Envelope{
					Body: &driverv1.Envelope_Cancel{Cancel: &driverv1.Cancel{OperationId: e.id}},
				})
				// What is sent to one replica is taken in order: its answer to this
				// says that it has had the cancel.
				w.directed(w.replica.name, "ops", e.sub.Subject, &driverv1.Envelope{
					OperationId: e.id, Body: &driverv1.Envelope_Ops{Ops: &driverv1.OpsRequest{OperationId: e.id}},
				})
				const framesAtMost = 9
				for range framesAtMost {
					if e.frame().GetOpsHeld() != nil {
						break
					}
				}
				close(release)
			},
			want: ended{Code: OK},
		},
		"drain timeout": {
			reason: "the call to the cloud was cut off",
			drain:  10 * time.Millisecond,
			end:    func(w *world, _ *exchange, _ chan struct{}) { w.stop() },
			want:   ended{Code: Canceled, Unknown: true},
		},
		"refused": {
			reason: "the cloud's own no is a known outcome",
			err:    refused,
			end:    func(_ *world, _ *exchange, release chan struct{}) { close(release) },
			want:   ended{Code: ResourceExhausted},
		},
		"lost": {
			reason: "the driver says that the answer was lost, and its code stays",
			err:    WithRetryAfter(OutcomeUnknown(Errorf(Unavailable, "connection reset")), time.Second),
			end:    func(_ *world, _ *exchange, release chan struct{}) { close(release) },
			want:   ended{Code: Unavailable, Unknown: true},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, started, release := blocking()
			wait := d.onCreate
			d.onCreate = func(ctx context.Context, req *Request[testSpec]) (*Instance, error) {
				made, err := wait(ctx, req)
				if err == nil && tc.err != nil {
					return nil, tc.err
				}

				return made, err
			}
			w := start(t, d, func(c *Config) { c.DrainTimeout = tc.drain })
			e := w.ask(create(machine("m1"), &driverv1.ClassReference{Class: w.store.setClass("c", "1", `{"size":"s"}`)}))
			<-started
			tc.end(w, e, release)
			result := e.result()
			got := ended{Code: result.GetStatus().GetCode(), Unknown: result.GetOutcomeUnknown()}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("%s (-want +got):\n%s\n%v", tc.reason, diff, result)
			}
		})
	}
}

// A gated driver's list of instances waits for its context.
type gated struct {
	testDriver

	started chan struct{}
}

func (g *gated) List(ctx context.Context, _ *Class[testSpec]) ([]*Instance, error) {
	close(g.started)
	<-ctx.Done()

	return nil, ctx.Err()
}

func TestServe_CancelBeforeBegin(t *testing.T) {
	t.Parallel()
	d := &gated{started: make(chan struct{})}
	w := start(t, d, nil)
	env := create(machine("m1"), &driverv1.ClassReference{Class: w.store.setClass("c", "1", `{"size":"s"}`)})
	env.Recover, env.Attempt = true, 2 // which looks at what exists before it begins
	e := w.ask(env)
	<-d.started
	w.directed(w.replica.name, "cancel", "", &driverv1.Envelope{
		Body: &driverv1.Envelope_Cancel{Cancel: &driverv1.Cancel{OperationId: e.id}},
	})
	// It began nothing, and did not come to see what the attempt before it had done.
	if got := e.result(); got.GetStatus().GetCode() != Canceled || !got.GetOutcomeUnknown() {
		t.Errorf("want %v and an unknown outcome, have %v", Canceled, got)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.creates != 0 {
		t.Errorf("Create was called %d times after the cancel", d.creates)
	}
}
