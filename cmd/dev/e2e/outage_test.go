package e2e

import (
	"testing"
	"time"
)

// outage is how long the bus is away: longer than a replica may be silent before
// it is given up, and longer than clients wait between tries to reconnect.
const outage = 20 * time.Second

// TestBusOutage stops the nats-server during creates, which end while their outcome cannot
// be sent.
func TestBusOutage(t *testing.T) {
	e := newEnv(t)
	nats, err := e.site.StartNATS(e.ctx())
	e.must(err)
	_, tap := e.startManager(nats.URL)
	drivers := e.startDrivers(2, nats.URL, tap)
	e.createClass()
	const machines = 6
	e.must(e.cloud.Hold(e.ctx(), "*"))
	names := e.createMachines(machines, className)
	e.waitHeld(machines, tap, drivers)

	e.must(nats.Stop())
	e.must(e.cloud.Hold(e.ctx()))
	back := time.NewTimer(outage) // the length of the outage is what is tested
	select {
	case <-back.C:
	case <-e.ctx().Done():
		t.Fatal("the test was ended")
	}
	if err := e.site.Failed(); err != nil {
		t.Fatalf("during the outage: %v", err)
	}
	e.must(nats.Restart(e.ctx()))
	e.waitRunning(names...)
	e.wantInstances(machines)

	// No replica was considered dead because the bus was down: no work went to another one.
	for _, audit := range tap.Audits() {
		if audit.GetAttempts() > 1 {
			t.Errorf("operation %s took %d attempts", audit.GetOperationId(), audit.GetAttempts())
		}
	}
	e.deleteAll(names...)
	e.wantInstances(machines)
}
