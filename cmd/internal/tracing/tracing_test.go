package tracing

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel"
	coltrace "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"
)

func TestOffUnlessConfigured(t *testing.T) {
	cases := map[string]struct {
		reason string
		env    map[string]string
		want   bool
	}{
		"nothing set":      {"no cost without a wish", nil, false},
		"endpoint":         {"the usual way", map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, true},
		"traces' endpoint": {"of traces alone", map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, true},
		"exporter":         {"such as console", map[string]string{"OTEL_TRACES_EXPORTER": "console"}, true},
		"none": {
			"the specification's word for no exporter",
			map[string]string{"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"},
			false,
		},
		"disabled": {
			"the switch of the specification", map[string]string{"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"}, false,
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			for _, variable := range append(switches, "OTEL_SDK_DISABLED") {
				t.Setenv(variable, tc.env[variable])
			}
			if got := wanted(); got != tc.want {
				t.Errorf("traced: %v, want %v: %s", got, tc.want, tc.reason)
			}
		})
	}
}

func TestWrongExporter(t *testing.T) {
	t.Setenv("OTEL_TRACES_EXPORTER", "carrier-pigeon")
	if _, err := Start(t.Context(), "mcm", "1", nil); err == nil {
		t.Error("no error for an exporter that does not exist")
	}
}

// TestCollectorAway runs without a collector: the error is only reported.
func TestCollectorAway(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
	t.Setenv("OTEL_BSP_EXPORT_TIMEOUT", "100")
	reported := make(chan error, 10)
	stop, err := Start(t.Context(), "mcm", "1", func(err error) { reported <- err })
	if err != nil {
		t.Fatal(err)
	}
	_, span := otel.Tracer("test").Start(t.Context(), "a span")
	span.End()
	stop()
	select {
	case <-reported:
	default:
		t.Error("the loss of spans was not reported")
	}
}

// TestExport has spans arrive at a collector.
func TestExport(t *testing.T) {
	got := make(chan *coltrace.ExportTraceServiceRequest, 10)
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		request := &coltrace.ExportTraceServiceRequest{}
		if err == nil {
			err = proto.Unmarshal(body, request)
		}
		if err != nil {
			t.Error(err)
		}
		got <- request
	}))
	defer collector.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "service.version=2")
	stop, err := Start(t.Context(), "mcm", "1", func(err error) { t.Error(err) })
	if err != nil {
		t.Fatal(err)
	}
	_, span := otel.Tracer("test").Start(t.Context(), "a span")
	span.End()
	stop()
	of := map[string]string{}
	spans := (<-got).GetResourceSpans()[0]
	for _, attribute := range spans.GetResource().GetAttributes() {
		of[attribute.GetKey()] = attribute.GetValue().GetStringValue()
	}
	want := map[string]string{"name": "a span", "service.name": "mcm", "service.version": "2"}
	have := map[string]string{
		"name": spans.GetScopeSpans()[0].GetSpans()[0].GetName(), "service.name": of["service.name"], "service.version": of["service.version"],
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("export (-want +got):\n%s", diff)
	}
}
