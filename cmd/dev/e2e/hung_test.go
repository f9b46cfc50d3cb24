package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// TestHungCall has the cloud hold back its answers to creates, for which a driver that
// ignores its deadlines waits. The replica gives these calls up, and another one goes on
// with the one machine and removes the other.
func TestHungCall(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("", "--machine-operation-timeout=4s")
	hung := e.startDrivers(1, manager.NATSURL, tap, "--mock-ignore-deadlines")[0]
	e.createClass()
	e.must(e.cloud.Hold(e.ctx(), "*"))
	names := e.createMachines(2, className)
	e.eventually("both machines say which replica to restart", func(ctx context.Context) error {
		for _, name := range names {
			m, err := e.machine(ctx, name)
			if err != nil {
				return err
			}
			text := m.Status.LastOperation.Description
			if !strings.Contains(text, hung.Replica) || !strings.Contains(text, "restart") {
				return fmt.Errorf("%s says %q", name, text)
			}
		}
		return nil
	})
	e.eventually("the session lists two stuck calls", func(context.Context) error {
		session := tap.Sessions()[hung.Replica]
		if ops := session.GetOperations(); session.GetRunning() != 2 || len(ops) != 2 || !ops[0].GetStuck() || !ops[1].GetStuck() {
			return fmt.Errorf("it is %v", session)
		}
		return nil
	})

	e.deleteMachine(names[1])
	_, err := e.site.StartDriver(e.ctx(), tap, stack.DriverOptions{
		Name: "driver-virtual-new", NATSURL: manager.NATSURL, Clusters: []string{e.name},
	})
	e.must(err)
	e.waitRunning(names[0])
	e.eventually("the deleted machine and its instance are gone", func(ctx context.Context) error {
		if _, err := e.machine(ctx, names[1]); !apierrors.IsNotFound(err) {
			return errors.Join(errors.New("the machine is there"), err)
		}
		instances, err := e.cloud.Instances(ctx)
		if len(instances) != 1 {
			err = errors.Join(fmt.Errorf("the cloud has %d instances", len(instances)), err)
		}
		return err
	})

	// The calls return after all.
	e.must(e.cloud.Hold(e.ctx()))
	e.eventually("the replica is free again", func(context.Context) error {
		if n := tap.Sessions()[hung.Replica].GetRunning(); n > 0 {
			return errors.New("calls still run")
		}
		return nil
	})
	e.wantNoDuplicates()
	e.deleteMachine(names[0])
	e.waitGone(names[0])
}
