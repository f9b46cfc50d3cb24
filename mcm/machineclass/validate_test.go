package machineclass_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A fleet is a bus and the drivers on it.
type fleet struct {
	srv *embedded.Server
	// asked gets the reference of each class that a driver was asked about.
	asked chan *driverv1.ClassReference
}

// newValidatingRig is a rig whose manager has classes checked by the drivers of a
// bus, on which there are none so far.
func newValidatingRig(t *testing.T) (*rig, *fleet) {
	t.Helper()
	f := &fleet{srv: bustest.Server(t, embedded.Options{}), asked: make(chan *driverv1.ClassReference, 100)}
	conn := bustest.Connect(t, bus.Config{URLs: []string{f.srv.URL()}, Name: "mcm"})
	asking, err := caller.New(conn, caller.Config{Cluster: "default", Logger: bustest.Quiet()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(asking.Close)
	r := newRig(t)
	r.caller = asking
	r.run(t)

	return r, f
}

// driver starts a replica of provider virtual that answers about classes.
func (f *fleet) driver(t *testing.T, answer func(class string) *driverv1.Result, ops ...driverv1.Operation) {
	t.Helper()
	conn := bustest.Connect(t, bus.Config{URLs: []string{f.srv.URL()}, Name: "driver", InboxPrefix: bus.InboxPrefix("virtual")})
	server, err := replica.New(conn, replica.Config{
		Provider: "virtual", Slots: 4, Logger: bustest.Quiet(), CreateIdentity: driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN,
		Capabilities: append([]driverv1.Operation{
			driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_DELETE, driverv1.Operation_OPERATION_LIST,
		}, ops...),
	}, replica.HandlerFunc(func(_ context.Context, t *replica.Task) *driverv1.Result {
		ref := t.Request.GetValidate().GetClass()
		f.asked <- ref

		return answer(ref.GetClass().GetName())
	}))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

const validate = driverv1.Operation_OPERATION_VALIDATE

func accepts(string) *driverv1.Result { return &driverv1.Result{} }

func refuses(code driverv1.Code, text string) func(string) *driverv1.Result {
	return func(string) *driverv1.Result {
		return &driverv1.Result{Status: bus.StatusOf(bus.Errorf(code, "%s", text))}
	}
}

func TestADriversAnswerIsShown(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		answer func(string) *driverv1.Result
		want   []string
	}{
		"accepted": {
			"the user sees that the driver has checked it", accepts,
			[]string{"ClassAccepted: The driver of provider virtual accepts the class"},
		},
		"faulty field": {
			"the driver names the field, the remedy is the user's",
			refuses(driverv1.Code_CODE_INVALID_ARGUMENT, "machineType is missing"),
			[]string{"InvalidClass: The driver of provider virtual cannot use the class: InvalidArgument: machineType is missing; " +
				"correct the class and apply it again"},
		},
		"wrong credentials": {
			"the class is not at fault", refuses(driverv1.Code_CODE_UNAUTHENTICATED, "token expired"),
			[]string{"InvalidClass: The driver of provider virtual cannot use the class: Unauthenticated: token expired; " +
				"correct the credentials in its secrets or their permissions"},
		},
		"cloud away": {
			"it says nothing about the class", refuses(driverv1.Code_CODE_UNAVAILABLE, "no route"),
			[]string{"ClassNotChecked: The driver of provider virtual could not check the class; retries until it answers: " +
				"Unavailable: no route"},
		},
		"warnings": {
			"they do not keep the class from being used",
			func(string) *driverv1.Result {
				return &driverv1.Result{Payload: &driverv1.Result_Validate{
					Validate: &driverv1.ValidateResponse{Warnings: []string{"image is old", "zone is full"}},
				}}
			},
			[]string{
				"ClassAccepted: The driver of provider virtual accepts the class",
				"ClassWarning: The driver of provider virtual warns: image is old",
				"ClassWarning: The driver of provider virtual warns: zone is full",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, f := newValidatingRig(t)
			f.driver(t, tc.answer, validate)
			r.create(t, r.class("small"))
			for _, want := range tc.want {
				r.event(t, "small", want)
			}
			got := r.events(t, "small")
			slices.Sort(got)
			if !slices.Equal(got, tc.want) {
				t.Errorf("%s; the Events are\n%s", tc.reason, strings.Join(got, "\n"))
			}
		})
	}
}

func TestALongAnswerFitsAnEvent(t *testing.T) {
	t.Parallel()
	r, f := newValidatingRig(t)
	f.driver(t, refuses(driverv1.Code_CODE_INVALID_ARGUMENT, strings.Repeat("ä", 5000)), validate)
	r.create(t, r.class("small"))
	if !poll(func() bool { return len(r.events(t, "small")) == 1 }) {
		t.Fatal("no Event")
	}
	if got := r.events(t, "small")[0]; len(got) > 1024 || !strings.HasSuffix(got, "ä…; correct the class and apply it again") {
		t.Errorf("a text of %d bytes that ends with %q", len(got), got[len(got)-60:])
	}
}

func TestWhatADriverSeesIsAskedAboutAgain(t *testing.T) {
	t.Parallel()
	r, f := newValidatingRig(t)
	f.driver(t, accepts, validate)
	boot := r.secret("boot")
	boot.Data = map[string][]byte{"userData": []byte("a")}
	class := r.class("small", "boot")
	r.create(t, class)
	// Without its secret the class cannot be checked; its machines report that.
	marker := r.class("marker")
	r.create(t, marker)
	if ref := bustest.Receive(t, "a question", f.asked); ref.GetClass().GetName() != "marker" {
		t.Fatalf("asked about %s, whose secret is missing", ref.GetClass().GetName())
	}
	r.create(t, boot)
	asked := func(what string) *driverv1.ClassReference {
		t.Helper()
		ref := bustest.Receive(t, "a question for "+what, f.asked)
		if ref.GetClass().GetName() != "small" {
			t.Fatalf("%s: asked about %s", what, ref.GetClass().GetName())
		}

		return ref
	}
	if ref := asked("the new class"); ref.GetSecret().GetName() != "boot" || ref.GetCredentialsSecret() != nil {
		t.Errorf("the request names other secrets than the class's: %v", ref)
	}
	r.until(t, boot, secretFinalizer)
	boot.Data["userData"] = []byte("b")
	update(t, r, boot)
	asked("the changed secret")
	class.ProviderSpec = runtime.RawExtension{Raw: []byte(`{"a":"b"}`)}
	update(t, r, class)
	asked("the changed class")

	// Metadata is no news: the next question is about something else.
	class.Labels = map[string]string{"a": "b"}
	update(t, r, class)
	boot.Labels = map[string]string{"a": "b"}
	update(t, r, boot)
	marker.ProviderSpec = runtime.RawExtension{Raw: []byte(`{"a":"b"}`)}
	update(t, r, marker)
	if ref := bustest.Receive(t, "a question", f.asked); ref.GetClass().GetName() != "marker" {
		t.Errorf("asked about %s although only metadata has changed", ref.GetClass().GetName())
	}
}

func update(t *testing.T, r *rig, o client.Object) {
	t.Helper()
	if err := r.Update(t.Context(), o); err != nil {
		t.Fatal(err)
	}
}

func TestADriverWithoutValidationIsNotAsked(t *testing.T) {
	t.Parallel()
	r, f := newValidatingRig(t)
	f.driver(t, accepts)
	bustest.Eventually(t, "session of the replica", func() bool { return len(r.caller.Replicas()) == 1 })
	r.create(t, r.class("small"))
	unnamed := r.class("unnamed") // is looked at after the first
	unnamed.Provider = ""
	r.create(t, unnamed)
	r.event(t, "unnamed", "InvalidClass: MachineClass unnamed names no provider: set its field provider, or run mcm with --default-provider")
	f.driver(t, accepts, validate)
	bustest.Eventually(t, "session of the second replica", func() bool { return len(r.caller.Replicas()) == 2 })
	r.create(t, r.class("other"))
	r.event(t, "other", "ClassAccepted: The driver of provider virtual accepts the class")
	if got := r.events(t, "small"); len(got) > 0 {
		t.Errorf("no driver validates classes, but there are Events: %q", got)
	}
	if ref := bustest.Receive(t, "the question about the second class", f.asked); ref.GetClass().GetName() != "other" {
		t.Errorf("a driver was asked about %s", ref.GetClass().GetName())
	}
}

func TestAClassWaitsForItsDriver(t *testing.T) {
	t.Parallel()
	r, f := newValidatingRig(t)
	unserved, gone := r.class("unserved"), r.class("gone")
	r.create(t, unserved)
	r.create(t, gone)
	unnamed := r.class("unnamed")
	unnamed.Provider = ""
	r.create(t, unnamed)
	r.event(t, "unnamed", "InvalidClass: MachineClass unnamed names no provider: set its field provider, or run mcm with --default-provider")
	r.delete(t, gone)
	r.untilGone(t, gone)
	if got := append(r.events(t, "unserved"), r.events(t, "gone")...); len(got) > 0 {
		t.Errorf("no driver has answered, but there are Events: %q", got)
	}
	f.driver(t, accepts, validate)
	r.event(t, "unserved", "ClassAccepted: The driver of provider virtual accepts the class")
}
