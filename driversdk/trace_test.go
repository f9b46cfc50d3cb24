package driversdk

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/machinebus/machinebus/bus/bustest"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	testTrace  = "0af7651916cd43dd8448eb211c80319c"
	testParent = "b7ad6b7169203331"
	sampled    = "00-" + testTrace + "-" + testParent + "-01"
)

// startTraced serves d with a class, its secret and an exporter of spans.
func startTraced(t *testing.T, d *testDriver) (*world, *driverv1.ClassReference, *tracetest.InMemoryExporter) {
	t.Helper()
	spans := tracetest.NewInMemoryExporter()
	w := start(t, d, func(cfg *Config) {
		cfg.Traces = sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans))
	})
	w.store.bootstrap["<<BOOTSTRAP_TOKEN>>"] = "abcdef.0123456789abcdef"
	class := &driverv1.ClassReference{
		Class: w.store.setClass("c", "1", `{"size":"big"}`),
		Secret: w.store.setSecret("s", "1", map[string]string{
			"password": "a password in a trace", "userData": "token: <<BOOTSTRAP_TOKEN>>",
		}),
	}

	return w, class, spans
}

// edges lists the spans of the test's trace, each with the name of the one above
// it.
func edges(t *testing.T, spans tracetest.SpanStubs) []string {
	t.Helper()
	names := map[string]string{testParent: "manager"}
	for _, s := range spans {
		names[s.SpanContext.SpanID().String()] = s.Name
		if got := s.SpanContext.TraceID().String(); got != testTrace {
			t.Errorf("span %q is of trace %s, want %s", s.Name, got, testTrace)
		}
	}
	var all []string
	for _, s := range spans {
		all = append(all, names[s.Parent.SpanID().String()]+" > "+s.Name)
	}
	slices.Sort(all)

	return all
}

func TestTrace(t *testing.T) {
	t.Parallel()
	w, class, spans := startTraced(t, &testDriver{})
	env := create(machine("m"), class)
	w.askTraced(env, sampled).result()
	bustest.Eventually(t, "the operation's span has ended", func() bool { return len(spans.GetSpans()) == 5 })
	want := []string{
		"driver create > Create", "driver create > fetch bootstrap", "driver create > fetch class",
		"driver create > fetch secret", "manager > driver create",
	}
	if diff := cmp.Diff(want, edges(t, spans.GetSpans())); diff != "" {
		t.Errorf("spans (-want +got):\n%s", diff)
	}

	// The replica is lost, the manager does not know what came of it, and tries
	// again below the same span.
	spans.Reset()
	again := create(machine("m"), class)
	again.OperationId, again.Attempt, again.Recover = env.GetOperationId(), 2, true
	w.askTraced(again, sampled).result()
	bustest.Eventually(t, "the next attempt's span has ended", func() bool { return len(spans.GetSpans()) == 3 })
	want = []string{"driver create > List", "driver create > fetch bootstrap", "manager > driver create"}
	if diff := cmp.Diff(want, edges(t, spans.GetSpans())); diff != "" {
		t.Errorf("spans of the second attempt (-want +got):\n%s", diff)
	}
	attributes := map[string]string{}
	for _, s := range spans.GetSpans() {
		for _, a := range s.Attributes {
			attributes[string(a.Key)] = a.Value.String()
		}
	}
	wantAttributes := map[string]string{
		"machinebus.attempt": "2", "machinebus.recover": "true", "machinebus.operation_id": env.GetOperationId(),
		"machinebus.machine": "ns/m", "machinebus.class": "ns/c", "machinebus.provider": testProvider,
		"machinebus.cluster": testCluster, "machinebus.replica": w.replica.name,
	}
	if diff := cmp.Diff(wantAttributes, attributes); diff != "" {
		t.Errorf("attributes (-want +got):\n%s", diff)
	}
}

func TestTraceOfAFailureHoldsNoSecret(t *testing.T) {
	t.Parallel()
	words := func(req *Request[testSpec]) string {
		return fmt.Sprintf("no room for password %s, user data %s", string(req.Class.Secret["password"]), string(req.UserData))
	}
	for code, create := range map[string]func(context.Context, *Request[testSpec]) (*Instance, error){
		"ResourceExhausted": func(_ context.Context, req *Request[testSpec]) (*Instance, error) {
			return nil, Errorf(ResourceExhausted, "%s", words(req))
		},
		"Internal": func(_ context.Context, req *Request[testSpec]) (*Instance, error) {
			panic(words(req)) //nolint:forbidigo // as a driver might
		},
	} {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			testTraceOfAFailure(t, code, &testDriver{onCreate: create})
		})
	}
}

func testTraceOfAFailure(t *testing.T, code string, d *testDriver) {
	t.Helper()
	w, class, spans := startTraced(t, d)
	w.askTraced(create(machine("m"), class), sampled).result()
	bustest.Eventually(t, "the operation's span has ended", func() bool { return len(spans.GetSpans()) == 5 })
	for _, s := range spans.GetSpans() {
		failed := s.Name == "Create" || s.Name == "driver create"
		if failed && (s.Status.Code != codes.Error || s.Status.Description != code) {
			t.Errorf("status of span %q is %+v, want a failure with the driver's code", s.Name, s.Status)
		}
		text := fmt.Sprintf("%q", []any{s.Name, s.Status, s.Attributes, s.Events})
		for _, secret := range []string{"a password in a trace", "0123456789abcdef"} {
			if strings.Contains(text, secret) {
				t.Errorf("span %q holds a secret: %s", s.Name, text)
			}
		}
	}
}

func TestNoTraceUnlessTheManagerSampled(t *testing.T) {
	t.Parallel()
	w, class, spans := startTraced(t, &testDriver{})
	for name, traceParent := range map[string]string{
		"none": "", "not-sampled": "00-" + testTrace + "-" + testParent + "-00",
	} {
		w.askTraced(create(machine(name), class), traceParent).result()
	}
	// One that is sampled, behind them.
	w.askTraced(create(machine("m"), class), sampled).result()
	bustest.Eventually(t, "its span has ended", func() bool { return len(spans.GetSpans()) == 3 })
	if diff := cmp.Diff([]string{"driver create > Create", "driver create > fetch bootstrap", "manager > driver create"},
		edges(t, spans.GetSpans())); diff != "" {
		t.Errorf("spans (-want +got):\n%s", diff)
	}
}
