package e2e

import (
	"errors"
	"testing"

	"github.com/machinebus/machinebus/cmd/internal/stack"
)

// TestAPIServerRestart kills the API server, and etcd with it, in the middle of
// creates and of deletes. What drivers do meanwhile is stored afterwards.
func TestAPIServerRestart(t *testing.T) {
	t.Parallel()
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
			t.Errorf("operation %s took %d attempts: nothing was wrong with its replica", id, n)
		}
	}
	e.wantCreates(tap, machines)

	e.slowDeletes()
	for _, name := range names {
		e.deleteMachine(name)
	}
	e.waitDeleting(machines)
	e.must(e.cluster.Kill())
	e.waitEmpty()
	e.must(e.cluster.Restart(e.ctx()))
	e.waitGone(names...)
	e.wantInstances(machines)
	select {
	case <-manager.Done():
		e.Fatal(errors.Join(errors.New("the manager has ended"), e.site.Failed()))
	default:
	}
}

var _ = stack.Loopback
