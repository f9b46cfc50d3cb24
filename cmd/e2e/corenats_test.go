package e2e

import (
	"os"
	"strings"
	"testing"
)

// TestWithoutJetStream runs on a NATS that stores nothing: machines come and go, and
// operators are told what is missing, once and with the remedy.
func TestWithoutJetStream(t *testing.T) {
	e := newEnv(t)
	nats, err := e.site.StartCoreNATS(e.ctx())
	e.must(err)
	manager, tap := e.startManager(nats.URL)
	drivers := e.startDrivers(2, nats.URL, tap)
	e.createClass()
	const machines = 4
	names := e.createMachines(machines, className)
	e.waitRunning(names...)
	e.wantInstances(machines)
	const metric = "mcm_dispatch_operations_stream_ready"
	e.wantTidyMetrics(manager.Address, metric)
	if ready := e.counter(manager, metric, virtualProvider); ready != 0 {
		t.Errorf("%s is %g, want 0", metric, ready)
	}
	for _, d := range drivers {
		if tap.Sessions()[d.Replica].GetLeased() {
			t.Errorf("replica %s has a lease, which nobody can have given", d.Replica)
		}
	}
	e.must(drivers[0].Kill()) // whose death no tombstone proves
	e.deleteAll(names...)
	e.wantInstances(machines)
	log, err := os.ReadFile(manager.Log)
	e.must(err)
	var warnings []string
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, "NATS has no JetStream") {
			warnings = append(warnings, line)
		}
	}
	if len(warnings) != 1 || !strings.Contains(warnings[0], "--nats-store-dir") {
		t.Errorf("log warns %d times, want once and with the remedy: %q", len(warnings), warnings)
	}
}
