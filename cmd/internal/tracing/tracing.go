// Package tracing exports the spans of a program as set by the standard variables of
// OpenTelemetry. It is for the programs of this repository; other drivers set up an
// exporter in their own main.
package tracing

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"go.opentelemetry.io/contrib/exporters/autoexport"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

// flushLimit is how long the last spans may take when the program ends.
const flushLimit = 5 * time.Second

// switches are the variables that switch traces on.
var switches = []string{"OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"}

// Start sets OpenTelemetry's global tracer provider to one that exports if one of the
// variables OTEL_TRACES_EXPORTER, OTEL_EXPORTER_OTLP_ENDPOINT and
// OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set and OTEL_SDK_DISABLED is not true. Otherwise
// nothing is traced. The other variables of OpenTelemetry (protocol, headers, sampler,
// resource) have their specified meaning. report is called with errors of exports: a
// program must not fail because of its collector. stop sends the last spans.
func Start(ctx context.Context, service, version string, report func(error)) (stop func(), err error) {
	if !wanted() {
		return func() {}, nil
	}
	exporter, err := autoexport.NewSpanExporter(ctx)
	if err != nil {
		return nil, fmt.Errorf("set up traces as the OTEL_ variables define: %w", err)
	}
	// In this order OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence.
	of, err := resource.New(ctx, resource.WithTelemetrySDK(), resource.WithHost(), resource.WithAttributes(
		attribute.String("service.name", service), attribute.String("service.version", version),
	), resource.WithFromEnv())
	if err != nil && !errors.Is(err, resource.ErrPartialResource) {
		return nil, fmt.Errorf("describe this program for its traces: %w", err)
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(of))
	otel.SetErrorHandler(otel.ErrorHandlerFunc(report))
	otel.SetTracerProvider(provider)

	return func() {
		// The program's own context has ended by now.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushLimit)
		defer cancel()
		if err := provider.Shutdown(ctx); err != nil {
			report(fmt.Errorf("send the last spans: %w", err))
		}
	}, nil
}

func wanted() bool {
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") || os.Getenv("OTEL_TRACES_EXPORTER") == "none" {
		return false
	}
	for _, name := range switches {
		if os.Getenv(name) != "" {
			return true
		}
	}

	return false
}
