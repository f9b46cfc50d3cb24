package e2e

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// TestAPIServerRestart kills the API server, and etcd with it, in the middle of
// creates and of deletes. What the drivers do meanwhile must not be lost.
func TestAPIServerRestart(t *testing.T) {
	e := newClusterEnv(t)
	manager, tap := e.startManager("")
	drivers := e.startDrivers(2, manager.NATSURL, tap)
	e.createClass()
	const machines = 6
	e.must(e.cloud.Hold(e.ctx(), "*"))
	names := e.createMachines(machines, className)
	e.waitHeld(machines, tap, drivers)
	var creates []string
	for _, d := range drivers {
		creates = append(creates, tap.Running(d.Replica, create)...)
	}

	e.must(e.cluster.Kill())
	e.must(e.cloud.Hold(e.ctx()))
	ended := e.waitEnded(tap, creates)
	e.must(e.cluster.Restart(e.ctx()))
	e.waitRunning(names...)
	e.wantInstances(machines)
	for _, id := range creates {
		if n := ended[id].GetAttempts(); n != 1 {
			t.Errorf("operation %s took %d attempts, but nothing was wrong with its replica", id, n)
		}
	}

	latency := cloudapi.Duration(2 * time.Second)
	_, err := e.cloud.Admin.Patch(e.ctx(), cloudapi.KnobsPatch{DeleteLatency: &latency})
	e.must(err)
	for _, name := range names {
		e.deleteMachine(name)
	}
	e.waitDeleting(names[0])
	e.must(e.cluster.Kill())
	e.eventually("that instance is gone", func(ctx context.Context) error {
		stats, err := e.cloud.Admin.Stats(ctx)
		if err == nil && stats.Deleted == 0 {
			err = fmt.Errorf("%d live", stats.Live)
		}
		return err
	})
	e.must(e.cluster.Restart(e.ctx()))
	e.waitGone(names...)
	e.wantInstances(machines)
}

// waitDeleting waits until the cloud is about to remove a machine's instance.
func (e *env) waitDeleting(machine string) {
	e.Helper()
	e.eventually("the instance of "+machine+" is being deleted", func(ctx context.Context) error {
		instances, err := e.cloud.Instances(ctx)
		for _, i := range instances {
			if i.Name == machine && i.State != cloudapi.StateDeleting {
				return fmt.Errorf("it is %s", i.State)
			}
		}
		return err
	})
}
