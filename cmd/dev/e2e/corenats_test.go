package e2e

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// TestWithoutJetStream runs on a NATS that stores nothing: mcm is not ready, says why and
// what to do, and makes no instance.
func TestWithoutJetStream(t *testing.T) {
	e := newEnv(t)
	nats, err := e.site.StartCoreNATS(e.ctx())
	e.must(err)
	manager, err := e.site.StartManager(e.ctx(), stack.ManagerOptions{
		Control: e.cluster.Kubeconfig, Namespace: e.name, Cluster: e.name, NATSURL: nats.URL, Unready: true,
	})
	e.must(err)
	logs := func(what string) {
		e.eventually("mcm logs "+what, func(context.Context) error {
			log, err := os.ReadFile(manager.Log)
			if err == nil && !strings.Contains(string(log), what) {
				err = errors.New("it does not")
			}
			return err
		})
	}
	const remedy = "NATS has no JetStream for this user: enable it"
	if err := manager.Ready(e.ctx()); err == nil {
		t.Error("mcm is ready before there is a driver")
	}
	logs(remedy)
	tap := e.tap(nats.URL)
	e.startDrivers(1, nats.URL, tap)
	e.createClass()
	const machines = 2
	e.createMachines(machines, className)
	logs("MCM_OPS_" + e.name + "_" + virtualProvider)
	const metric = "mcm_dispatch_operations_stream_ready"
	e.wantTidyMetrics(manager.Address, metric)
	if ready := e.counter(manager, metric, virtualProvider); ready != 0 {
		t.Errorf("%s is %g, want 0", metric, ready)
	}
	if err := manager.Ready(e.ctx()); err == nil {
		t.Error("mcm is ready although nothing can be claimed")
	}
	e.wantInstances(0)
}

// TestStreamsInMemory runs mcm as the quick start does, without a directory: operations
// are claimed all the same.
func TestStreamsInMemory(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("", "--nats-store-dir=")
	drivers := e.startDrivers(2, manager.NATSURL, tap)
	e.createClass()
	const machines = 4
	names := e.createMachines(machines, className)
	e.waitRunning(names...)
	const metric = "mcm_dispatch_operations_stream_ready"
	if ready := e.counter(manager, metric, virtualProvider); ready != 1 {
		t.Errorf("%s is %g, want 1", metric, ready)
	}
	e.must(drivers[0].Kill())
	e.deleteAll(names...)
	e.wantInstances(machines)
}
