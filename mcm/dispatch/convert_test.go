package dispatch

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"google.golang.org/protobuf/testing/protocmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestProvider(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		reason, field, otherwise string
		want                     string
		code                     Code
	}{
		"named":           {"the class says it", "virtual", "aws", "virtual", OK},
		"upper case":      {"MachineClasses say AWS, subjects are lower case", "AWS", "", "aws", OK},
		"default":         {"old classes name none", "", "Virtual", "virtual", OK},
		"neither":         {"there is no driver to ask", "", "", "", InvalidArgument},
		"not a token":     {"it would be two tokens of a subject", "my.cloud", "", "", InvalidArgument},
		"wildcard":        {"it would reach every driver", "*", "", "", InvalidArgument},
		"default no good": {"a flag may be wrong as well", "", "a b", "", InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			class := &v1alpha1.MachineClass{ObjectMeta: metav1.ObjectMeta{Name: "small"}, Provider: c.field}
			got, err := Provider(class, c.otherwise)
			if got != c.want || CodeOf(err) != c.code {
				t.Errorf("Provider returned %q, %v; want %q and code %v: %s", got, err, c.want, c.code, c.reason)
			}
		})
	}
}

func TestRequest(t *testing.T) {
	t.Parallel()
	machine := &v1alpha1.Machine{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: "m1", UID: "u1",
			Labels: map[string]string{v1alpha1.LabelKeyNode: "n1", "team": "a"},
			Annotations: map[string]string{
				"note": "for the driver", v1alpha1.AnnotationKeyOperation: "{}", corev1.LastAppliedConfigAnnotation: "{...}",
			},
		},
		Spec: v1alpha1.MachineSpec{
			ProviderID: "virtual://1",
			NodeTemplateSpec: v1alpha1.NodeTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"pool": "x"}, Annotations: map[string]string{"b": "c"}},
				Spec:       corev1.NodeSpec{Taints: []corev1.Taint{{Key: "k", Value: "v", Effect: corev1.TaintEffectNoSchedule}}},
			},
		},
		Status: v1alpha1.MachineStatus{LastKnownState: "state"},
	}
	class := Class{
		Object:      &v1alpha1.MachineClass{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "small", UID: "u2", ResourceVersion: "7"}},
		Credentials: &metav1.ObjectMeta{Namespace: "keys", Name: "cloud", UID: "u3", ResourceVersion: "8"},
	}
	wantMachine := &driverv1.Machine{
		Namespace: "shop", Name: "m1", Uid: "u1", ProviderId: "virtual://1", NodeName: "n1", LastKnownState: "state",
		Labels: machine.Labels, Annotations: map[string]string{"note": "for the driver"},
		NodeTemplate: &driverv1.NodeTemplate{
			Labels: map[string]string{"pool": "x"}, Annotations: map[string]string{"b": "c"},
			Taints: []*driverv1.Taint{{Key: "k", Value: "v", Effect: "NoSchedule"}},
		},
	}
	wantClass := &driverv1.ClassReference{
		Class:             &driverv1.ObjectReference{Namespace: "shop", Name: "small", Uid: "u2", ResourceVersion: "7"},
		CredentialsSecret: &driverv1.ObjectReference{Namespace: "keys", Name: "cloud", Uid: "u3", ResourceVersion: "8"},
	}
	for kind, want := range map[Kind]*driverv1.Envelope{
		Create: {Body: &driverv1.Envelope_Create{
			Create: &driverv1.CreateRequest{Machine: wantMachine, Class: wantClass},
		}},
		Initialize: {Body: &driverv1.Envelope_Initialize{
			Initialize: &driverv1.InitializeRequest{Machine: wantMachine, Class: wantClass},
		}},
		Delete: {Body: &driverv1.Envelope_Delete{
			Delete: &driverv1.DeleteRequest{Machine: wantMachine, Class: wantClass},
		}},
	} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			got := request(&Operation{Kind: kind, Machine: machine, Class: class})
			if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
				t.Errorf("request (-want +got):\n%s", diff)
			}
			if kind.wire() != bus.OperationOf(got) {
				t.Errorf("kind %s is %v on the wire, its request is of %v", kind, kind.wire(), bus.OperationOf(got))
			}
		})
	}
	if ref := classMessage(Class{}); ref != nil {
		t.Errorf("reference to no class is %v", ref)
	}
}

func TestPayload(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		reason   string
		result   *driverv1.Result
		instance *Instance
		state    string
		stated   bool
	}{
		"nothing": {"an error that the bus made", nil, nil, "", false},
		"create": {"a driver may leave out all but the id", &driverv1.Result{Payload: &driverv1.Result_Create{
			Create: &driverv1.CreateResponse{Instance: &driverv1.Instance{ProviderId: "p"}, LastKnownState: "s"},
		}}, &Instance{ProviderID: "p"}, "s", true},
		"delete": {"nothing is left but the driver's memory", &driverv1.Result{Payload: &driverv1.Result_Delete{
			Delete: &driverv1.DeleteResponse{LastKnownState: "s"},
		}}, nil, "s", true},
		"initialize": {"it may not return the instance again", &driverv1.Result{Payload: &driverv1.Result_Initialize{
			Initialize: &driverv1.InitializeResponse{},
		}}, nil, "", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			instance, state, stated := payload(c.result)
			if diff := cmp.Diff(c.instance, instance); diff != "" || state != c.state || stated != c.stated {
				t.Errorf("payload is %q, %v: %s\n%s", state, stated, c.reason, diff)
			}
		})
	}
}

func TestRetryAfter(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		err    error
		want   time.Duration
	}{
		"none":     {"not a driver's", errors.New("no luck"), 0},
		"its word": {"it knows best", fmt.Errorf("create: %w", &bus.Error{RetryAfter: time.Minute}), time.Minute},
		"years":    {"a slip in the unit", &bus.Error{RetryAfter: 10000 * time.Hour}, time.Hour},
	} {
		if got := RetryAfter(tc.err); got != tc.want {
			t.Errorf("%s: %s, want %s: %s", name, got, tc.want, tc.reason)
		}
	}
}

// Tools compare errorCode with the names in the API package: one spelling for
// each code, here, there and on the wire.
func TestCodeNames(t *testing.T) {
	t.Parallel()
	names := map[Code]string{
		OK: v1alpha1.ErrorCodeOK, Canceled: v1alpha1.ErrorCodeCanceled, Unknown: v1alpha1.ErrorCodeUnknown,
		InvalidArgument: v1alpha1.ErrorCodeInvalidArgument, DeadlineExceeded: v1alpha1.ErrorCodeDeadlineExceeded,
		NotFound: v1alpha1.ErrorCodeNotFound, AlreadyExists: v1alpha1.ErrorCodeAlreadyExists,
		PermissionDenied: v1alpha1.ErrorCodePermissionDenied, ResourceExhausted: v1alpha1.ErrorCodeResourceExhausted,
		FailedPrecondition: v1alpha1.ErrorCodeFailedPrecondition, Aborted: v1alpha1.ErrorCodeAborted,
		OutOfRange: v1alpha1.ErrorCodeOutOfRange, Unimplemented: v1alpha1.ErrorCodeUnimplemented,
		Internal: v1alpha1.ErrorCodeInternal, Unavailable: v1alpha1.ErrorCodeUnavailable,
		DataLoss: v1alpha1.ErrorCodeDataLoss, Unauthenticated: v1alpha1.ErrorCodeUnauthenticated,
		Uninitialized: v1alpha1.ErrorCodeUninitialized,
	}
	for number := range driverv1.Code_name {
		code := Code(number)
		if want, ok := names[code]; !ok || code.String() != want || bus.CodeName(driverv1.Code(number)) != want {
			t.Errorf("code %d is %q here and %q in the API", number, code, want)
		}
	}
	if got := CodeOf(Errorf(ResourceExhausted, "no room")); got != ResourceExhausted {
		t.Errorf("code of an error is %v", got)
	}
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	d := New(t.Context(), nil, nil)
	d.metrics.started("virtual", Create)()
	d.metrics.finished("virtual", Create, nil, &caller.Outcome{Attempts: 2})
	registry := prometheus.NewRegistry()
	for _, c := range d.Collectors() {
		if err := registry.Register(c); err != nil {
			t.Fatal(err)
		}
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("metric %s: %s", p.Metric, p.Text)
	}
	got := map[string]float64{}
	for _, f := range families {
		m := f.GetMetric()[0]
		got[f.GetName()] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
	}
	want := map[string]float64{
		"mcm_dispatch_operations_in_flight": 0, "mcm_dispatch_operation_wait_seconds": 1,
		"mcm_dispatch_operation_duration_seconds": 1, "mcm_dispatch_attempts_total": 2,
		"mcm_cloud_api_driver_request_duration_seconds": 1,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}
