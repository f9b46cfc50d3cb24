package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// TestTwoControlPlanes has two managers of different names share one bus and one
// fleet of drivers. Neither may see or touch the other's machines.
func TestTwoControlPlanes(t *testing.T) {
	a := newEnv(t)
	b := newPlane(t, a.cloud)
	nats, err := a.site.StartNATS(a.ctx())
	a.must(err)
	managerA, tapA := a.startManager(nats.URL)
	_, tapB := b.startManager(nats.URL)
	fleet := a.startFleet(2, nats.URL, tapA, []string{a.name, b.name})

	const machines = 4
	a.must(a.cloud.Hold(a.ctx(), "*"))
	a.createClass()
	b.createClass()
	namesA := a.createMachines(machines, className)
	namesB := b.createMachines(machines, className)
	a.waitHeld(machines, tapA, fleet)
	b.waitHeld(machines, tapB, fleet)
	a.wantOwnSessions(tapA)
	b.wantOwnSessions(tapB)
	a.must(a.cloud.Hold(a.ctx()))
	a.waitRunning(namesA...)
	b.waitRunning(namesB...)
	a.wantInstances(2 * machines)
	a.wantOwnAudits(tapA, machines)
	b.wantOwnAudits(tapB, machines)

	// Without its manager no one creates its machines, not even the other manager.
	a.must(managerA.Stop())
	orphan := a.name + "-orphan"
	a.createMachine(orphan, className)
	witness := b.name + "-witness"
	b.createMachine(witness, className)
	b.waitRunning(witness)
	m, err := a.machine(a.ctx(), orphan)
	a.must(err)
	if len(m.Finalizers) > 0 || m.Status.CurrentStatus.Phase != "" || m.Status.LastOperation.Description != "" {
		t.Errorf("the other control plane touched machine %s: finalizers %v, status %+v", orphan, m.Finalizers, m.Status)
	}
	b.deleteAll(append(namesB, witness)...)
	live, err := a.cloud.Instances(a.ctx())
	a.must(err)
	if len(live) != machines {
		t.Errorf("%d instances live, want the %d of the control plane that deleted nothing", len(live), machines)
	}
}

// wantOwnSessions expects that the replicas' sessions list only operations of the control
// plane to which they are sent.
func (e *env) wantOwnSessions(tap *stack.Tap) {
	e.Helper()
	for replica, session := range tap.Sessions() {
		for _, operation := range session.GetOperations() {
			if operation.GetNamespace() != e.name {
				e.Errorf("replica %s lists for control plane %s an operation of %s/%s", replica, e.name, operation.GetNamespace(), operation.GetName())
			}
		}
	}
}

// wantOwnAudits expects that a control plane has had n creates done, all its own.
func (e *env) wantOwnAudits(tap *stack.Tap, n int) {
	e.Helper()
	e.eventually(fmt.Sprintf("%d creates have ended", n), func(context.Context) error {
		var creates []string
		for _, audit := range tap.Audits() {
			if audit.GetOperation() == create {
				creates = append(creates, audit.GetNamespace()+"/"+audit.GetName())
			}
			if audit.GetNamespace() != e.name {
				e.Errorf("control plane %s had an operation of %s/%s done", e.name, audit.GetNamespace(), audit.GetName())
			}
		}
		if len(creates) != n {
			return fmt.Errorf("there were %d: %s", len(creates), strings.Join(creates, " "))
		}
		return nil
	})
}
