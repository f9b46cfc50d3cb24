package e2e

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	coltrace "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// TestInsight has a create lose its replica, and then looks at what an operator
// would look at: traces, logs and metrics of all processes.
func TestInsight(t *testing.T) {
	e := newEnv(t)
	collector := newCollector(t)
	manager, err := e.site.StartManager(e.ctx(), stack.ManagerOptions{
		Control: shared.cluster.Kubeconfig, Namespace: e.name, Cluster: e.name,
		Args: []string{"-v=4", "--logging-format=json"}, Env: collector.env,
	})
	e.must(err)
	tap := e.tap(manager.NATSURL)
	var drivers []*stack.Driver
	var addresses []string
	for i := range 2 {
		port, err := stack.FreePort()
		e.must(err)
		driver, err := e.site.StartDriver(e.ctx(), tap, stack.DriverOptions{
			Name: fmt.Sprintf("driver-virtual-%d", i+1), NATSURL: manager.NATSURL, Clusters: []string{e.name},
			Args: []string{"--log-format=json", "--log-level=debug", "--listen", stack.Loopback(port)}, Env: collector.env,
		})
		e.must(err)
		drivers, addresses = append(drivers, driver), append(addresses, stack.Loopback(port))
	}
	markers := e.createMarkedClass(virtualProvider)
	e.must(e.cloud.Hold(e.ctx(), "*"))
	name := e.createMachines(1, className)[0]
	markers[bootstrapToken] = e.bootstrapSecret(name)
	e.waitHeld(1, tap, drivers)
	victim, survivor := 0, 1
	if len(tap.Running(drivers[victim].Replica, create)) == 0 {
		victim, survivor = survivor, victim
	}
	e.must(drivers[victim].Kill())
	e.must(e.cloud.Hold(e.ctx()))
	e.waitRunning(name)
	e.wantInstances(1)
	e.wantTidyMetrics(manager.Address, "mcm_dispatch_attempts_total", "mcm_dispatch_operation_duration_seconds",
		"mcm_dispatch_operations_in_flight", "mcm_dispatch_replies_dropped_total", "mcm_fetch_dropped_total",
		"mcm_dispatch_epoch", "mcm_dispatch_epoch_raised_total", "mcm_dispatch_rival_heard", "mcm_dispatch_replicas_refused")
	e.wantTidyMetrics(addresses[survivor], "machinebus_driver_operations_total", "machinebus_driver_fetches_total")
	e.deleteAll(name)
	e.must(e.site.Close()) // so that all has been written and sent

	uid := ""
	for _, audit := range tap.Audits() {
		uid, _, _ = strings.Cut(audit.GetOperationId(), ".")
	}
	collector.wantChain(uid+".create.0", drivers[survivor].Replica)
	for what, marker := range markers {
		if n := newNeedle(marker); slices.ContainsFunc(collector.bodies(), n.in) {
			t.Errorf("the traces hold the %s", what)
		}
	}
	e.wantOperationLines(manager.Log, uid, 3)
	e.wantOperationLines(drivers[survivor].Log, uid, 2)
}

// inherited are metrics whose names and labels the machine controller manager has
// chosen, and dashboards know.
var inherited = []string{
	"mcm_machine_set_items_total", "mcm_machine_deployment_items_total", "mcm_machine_items_total", "mcm_machine_info",
	"mcm_machine_num_failed_join",
}

// wantTidyMetrics expects metrics of these names, and no metric of ours whose
// name or help is against Prometheus's rules.
func (e *env) wantTidyMetrics(address string, names ...string) {
	e.Helper()
	response, err := http.Get("http://" + address + "/metrics")
	e.must(err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	e.must(err)
	for _, name := range names {
		if !strings.Contains(string(text), "\n# TYPE "+name+" ") {
			e.Errorf("%s shows no metric %s", address, name)
		}
	}
	problems, err := promlint.New(strings.NewReader(string(text))).Lint()
	e.must(err)
	for _, p := range problems {
		if slices.Contains(inherited, p.Metric) {
			continue
		}
		e.Errorf("metric %s: %s", p.Metric, p.Text)
	}
}

// wantOperationLines expects a log of only JSON, with complete lines about operations of
// a machine.
func (e *env) wantOperationLines(log, uid string, atLeast int) {
	e.Helper()
	content, err := os.ReadFile(log)
	e.must(err)
	lines := 0
	for line := range strings.Lines(string(content)) {
		fields := map[string]any{}
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			e.Errorf("%s has a line that is no JSON (%v): %s", log, err, line)
			continue
		}
		id, ok := fields["operation_id"].(string)
		if !ok || !strings.HasPrefix(id, uid) {
			continue
		}
		lines++
		for _, key := range []string{"machine", "attempt", "replica"} {
			if _, ok := fields[key]; !ok {
				e.Errorf("%s has a line about %s without %s: %s", log, id, key, line)
			}
		}
	}
	if lines < atLeast {
		e.Errorf("%s has %d lines about operations of the machine, want at least %d", log, lines, atLeast)
	}
}

// A collector takes spans as an OpenTelemetry collector does, over OTLP.
type collector struct {
	*testing.T

	env []string // for the processes that are to send theirs

	mu    sync.Mutex
	texts []string
	spans []*trace.Span
}

func newCollector(t *testing.T) *collector {
	t.Helper()
	c := &collector{T: t}
	server := httptest.NewServer(c)
	t.Cleanup(server.Close)
	c.env = []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + server.URL, "OTEL_BSP_SCHEDULE_DELAY=100"}
	return c
}

func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	request := &coltrace.ExportTraceServiceRequest{}
	if err == nil {
		err = proto.Unmarshal(body, request)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.texts = append(c.texts, string(body))
	for _, resource := range request.GetResourceSpans() {
		for _, scope := range resource.GetScopeSpans() {
			c.spans = append(c.spans, scope.GetSpans()...)
		}
	}
}

func (c *collector) bodies() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.texts)
}

// wantChain expects the spans of an operation that succeeded at its second
// attempt, at that replica, below each other.
func (c *collector) wantChain(operationID, replica string) {
	c.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	byID := map[string]*trace.Span{}
	var driver *trace.Span
	for _, s := range c.spans {
		byID[hex.EncodeToString(s.GetSpanId())] = s
		if s.GetName() == "driver create" && attribute(s, "machinebus.operation_id") == operationID {
			driver = s
		}
	}
	if driver == nil {
		c.Errorf("there is no span of operation %s among %d", operationID, len(c.spans))
		return
	}
	if got := attribute(driver, "machinebus.replica"); got != replica || attribute(driver, "machinebus.attempt") != "2" {
		c.Errorf("the driver's span is of replica %s, attempt %s; want %s and 2", got, attribute(driver, "machinebus.attempt"), replica)
	}
	var chain []string
	for s := driver; s != nil; s = byID[hex.EncodeToString(s.GetParentSpanId())] {
		chain = append(chain, s.GetName())
		if !bytes.Equal(s.GetTraceId(), driver.GetTraceId()) {
			c.Errorf("span %q is of another trace", s.GetName())
		}
	}
	if diff := cmp.Diff([]string{"driver create", "dispatch create", "reconcile machine"}, chain); diff != "" {
		c.Errorf("spans from the driver up (-want +got):\n%s", diff)
	}
	var below []string
	for _, s := range c.spans {
		if bytes.Equal(s.GetParentSpanId(), driver.GetSpanId()) {
			below = append(below, s.GetName())
		}
	}
	// The class may be known: this replica may be the one that was asked to check it.
	for _, want := range []string{"fetch secret", "fetch bootstrap"} {
		if !slices.Contains(below, want) {
			c.Errorf("below the driver's span there is no %q, but %q", want, below)
		}
	}
}

func attribute(s *trace.Span, key string) string {
	for _, a := range s.GetAttributes() {
		if a.GetKey() == key {
			if text := a.GetValue().GetStringValue(); text != "" {
				return text
			}
			return fmt.Sprint(a.GetValue().GetIntValue())
		}
	}
	return ""
}
