package driversdk

import (
	"context"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/replica"
)

const tracerName = "github.com/machinebus/machinebus/driversdk"

// traced starts the span of an operation below the manager's, if there is one: the
// manager samples, the replica does not.
func (h *handler[S]) traced(ctx context.Context, t *replica.Task) (context.Context, trace.Span) {
	if t.TraceParent == "" {
		return ctx, trace.SpanFromContext(ctx)
	}
	ctx = propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{"traceparent": t.TraceParent})
	provider := h.replica.cfg.Traces
	if provider == nil {
		provider = otel.GetTracerProvider()
	}
	req, m := t.Request, bus.MachineOf(t.Request)
	class := bus.ClassOf(req).GetClass()

	return provider.Tracer(tracerName).Start(ctx, "driver "+bus.Verb(t.Operation), //nolint:spancheck // Handle ends it
		trace.WithSpanKind(trace.SpanKindServer), trace.WithAttributes(
			attribute.String("machinebus.cluster", t.Cluster),
			attribute.String("machinebus.operation_id", req.GetOperationId()),
			attribute.Int64("machinebus.attempt", int64(req.GetAttempt())),
			attribute.Bool("machinebus.recover", req.GetRecover()),
			attribute.String("machinebus.machine", m.GetNamespace()+"/"+m.GetName()),
			attribute.String("machinebus.class", class.GetNamespace()+"/"+class.GetName()),
			attribute.String("machinebus.provider", h.replica.cfg.Provider),
			attribute.String("machinebus.replica", h.replica.name),
		))
}

// spanned makes a call to the cloud or to the manager in a span below that of
// the operation in ctx. Without one it costs nothing.
func spanned[T any](ctx context.Context, name string, call func(context.Context) (T, error)) (T, error) {
	above := trace.SpanFromContext(ctx)
	if !above.IsRecording() {
		return call(ctx)
	}
	ctx, own := above.TracerProvider().Tracer(tracerName).Start(ctx, name, trace.WithSpanKind(trace.SpanKindClient))
	code := Internal                              // of a call that panics
	defer func() { fail(own, code); own.End() }() // deferred itself, End would record what a panic says
	result, err := call(ctx)
	code = CodeOf(err)

	return result, err
}

// fail marks a span as failed unless the code is OK. The text of an error is a
// driver's or a cloud's, who may quote anything: it stays out of traces.
func fail(own trace.Span, code Code) {
	if code != OK {
		own.SetStatus(codes.Error, bus.CodeName(code))
	}
}
