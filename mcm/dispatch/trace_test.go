package dispatch_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/dispatch"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// spanOf returns the span that a driver gets as the parent of its own.
func spanOf(t *testing.T, task *replica.Task) trace.SpanContext {
	t.Helper()
	ctx := propagation.TraceContext{}.Extract(t.Context(), propagation.MapCarrier{"traceparent": task.TraceParent})

	return trace.SpanContextFromContext(ctx)
}

// TestTraceAcrossAttempts loses the replica that has a create: its next attempt
// is of the same span.
func TestTraceAcrossAttempts(t *testing.T) {
	t.Parallel()
	r, g := newRig(t), newGate(t)
	exporter := tracetest.NewInMemoryExporter()
	ctx, pass := sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter)).Tracer("test").Start(t.Context(), "pass")
	op := operation(dispatch.Create, newMachine("m1"), 0)
	op.Span = trace.SpanFromContext(ctx)
	lost := r.losable(t, g)
	r.Start(op)
	pass.End()
	first := spanOf(t, bustest.Receive(t, "the first attempt", g.entered))
	r.replica(t, g.handle)
	lost()
	task := bustest.Receive(t, "the second attempt", g.entered)
	if second := spanOf(t, task); !second.Equal(first) || task.Request.GetAttempt() != 2 {
		t.Errorf("attempt %d is below %v, want attempt 2 below %v", task.Request.GetAttempt(), second, first)
	}
	g.release()
	bustest.Eventually(t, "the operation's span has ended", func() bool { return len(exporter.GetSpans()) == 2 })

	span := exporter.GetSpans()[1]
	if span.Name != "dispatch create" || span.SpanContext.SpanID() != first.SpanID() || !first.IsSampled() ||
		span.Parent.SpanID() != pass.SpanContext().SpanID() || span.SpanContext.TraceID() != pass.SpanContext().TraceID() {
		t.Errorf("span is %q (%v) below %v, want the one that both attempts carried, below that of the pass",
			span.Name, span.SpanContext.SpanID(), span.Parent.SpanID())
	}
	var events []string
	for _, e := range span.Events {
		events = append(events, e.Name)
	}
	if diff := cmp.Diff([]string{"accepted", "accepted"}, events); diff != "" {
		t.Errorf("its events (-want +got):\n%s", diff)
	}
	if span.Status.Code != codes.Unset {
		t.Errorf("its status is %+v, want none: the create succeeded", span.Status)
	}
}

func TestTraceOfAFailure(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	exporter := tracetest.NewInMemoryExporter()
	_, pass := sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter)).Tracer("test").Start(t.Context(), "pass")
	g := newGate(t)
	g.answer = func(*replica.Task) *driverv1.Result {
		return &driverv1.Result{Status: bus.StatusOf(bus.Errorf(driverv1.Code_CODE_RESOURCE_EXHAUSTED, "words of a cloud"))}
	}
	g.release()
	r.replica(t, g.handle)
	op := operation(dispatch.Create, newMachine("m1"), 0)
	op.Span = pass
	r.Start(op)
	bustest.Eventually(t, "the operation's span has ended", func() bool { return len(exporter.GetSpans()) == 1 })
	if s := exporter.GetSpans()[0].Status; s.Code != codes.Error || s.Description != "ResourceExhausted" {
		t.Errorf("its status is %+v, want the code of the failure and no more", s)
	}
}

// TestNoTraceUnlessSampled has nothing cross the bus for a pass that is not
// sampled.
func TestNoTraceUnlessSampled(t *testing.T) {
	t.Parallel()
	_, unsampled := sdktrace.NewTracerProvider(sdktrace.WithSampler(sdktrace.NeverSample())).Tracer("test").Start(t.Context(), "pass")
	for name, span := range map[string]trace.Span{"none": nil, "not sampled": unsampled} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, g := newRig(t), newGate(t)
			g.release()
			r.replica(t, g.handle)
			op := operation(dispatch.Create, newMachine("m1"), 0)
			op.Span = span
			r.Start(op)
			if task := bustest.Receive(t, "the create", g.entered); task.TraceParent != "" {
				t.Errorf("the driver got trace %q", task.TraceParent)
			}
			r.until(t, op.Machine.UID, dispatch.Done)
		})
	}
}
