package dispatch

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/machinebus/machinebus/bus"
)

const tracerName = "github.com/machinebus/machinebus/mcm/dispatch"

// startSpan starts an operation's span below that of its pass, which ends long before. If the
// pass's span is not recorded, neither is this one.
func startSpan(op *Operation) trace.Span {
	if op.Span == nil || !op.Span.IsRecording() {
		return trace.SpanFromContext(context.Background()) //nolint:forbidigo // the span that does nothing
	}
	above := trace.ContextWithSpan(context.Background(), op.Span)                                    //nolint:forbidigo // a span is not cancelled
	_, span := op.Span.TracerProvider().Tracer(tracerName).Start(above, "dispatch "+string(op.Kind), //nolint:spancheck // run ends it
		trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(
			attribute.String("machinebus.operation_id", op.ID()),
			attribute.String("machinebus.machine", op.Machine.Namespace+"/"+op.Machine.Name),
			attribute.String("machinebus.class", op.Machine.Spec.Class.Name),
			attribute.String("machinebus.provider", op.Provider),
			attribute.Bool("machinebus.recover", op.Recover),
		))

	return span //nolint:spancheck // run ends it
}

// traceParent returns the trace header for the driver; empty if the span is not sampled.
func traceParent(span trace.Span) string {
	if !span.SpanContext().IsSampled() {
		return ""
	}
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(trace.ContextWithSpan(context.Background(), span), carrier) //nolint:forbidigo // only carries the span

	return carrier["traceparent"]
}

// traceAccepted and traceWaiting add events that show where an operation's time goes.
func traceAccepted(span trace.Span, attempt uint32, replica string) {
	if span.IsRecording() {
		span.AddEvent("accepted", trace.WithAttributes(
			attribute.Int64("machinebus.attempt", int64(attempt)), attribute.String("machinebus.replica", replica)))
	}
}

func traceWaiting(span trace.Span, cause error) {
	if span.IsRecording() {
		span.AddEvent("waiting", trace.WithAttributes(
			attribute.String("machinebus.code", CodeOf(cause).String()),
			attribute.Bool("machinebus.outcome_unknown", bus.OriginOf(cause) == bus.OriginTimeout)))
	}
}

// traceEnd adds how an operation ended, without the texts of the error or the driver.
func traceEnd(span trace.Span, state *State) {
	if !span.IsRecording() {
		return
	}
	code := CodeOf(state.Err)
	span.SetAttributes(attribute.String("machinebus.code", code.String()),
		attribute.Int64("machinebus.attempt", int64(state.Attempt)), attribute.String("machinebus.replica", state.Replica))
	if state.Err != nil {
		span.SetStatus(codes.Error, code.String())
	}
	span.End()
}
