package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const create = driverv1.Operation_OPERATION_CREATE

// halfWay waits until the machines that are not held back run, and the creates of all
// others are with a replica.
func (s *setup) halfWay(_ context.Context, machines []v1alpha1.Machine) error {
	held, running := 0, 0
	for _, d := range s.drivers {
		held += len(s.tap.Running(d.Replica, create))
	}
	for i := range machines {
		if machines[i].Status.CurrentStatus.Phase == v1alpha1.MachineRunning {
			running++
		}
	}
	if running != machineCount-heldCount || held != heldCount {
		return fmt.Errorf("%d run and %d creates are with the replicas", running, held)
	}
	return nil
}

// kill kills the replica with the most creates.
func (s *setup) kill(ctx context.Context) error {
	victim := slices.MaxFunc(s.drivers, func(a, b *stack.Driver) int {
		return len(s.tap.Running(a.Replica, create)) - len(s.tap.Running(b.Replica, create))
	})
	s.beginf("killing replica %s (SIGKILL, process %d)", victim.Replica, victim.PID())
	if err := victim.Kill(); err != nil {
		return err
	}
	s.victim = victim
	session := s.tap.Sessions()[victim.Replica]
	var names []string
	for _, state := range session.GetOperations() {
		if state.GetOperation() == create && !state.GetSettled() {
			s.killed = append(s.killed, state.GetOperationId())
			names = append(names, state.GetName())
		}
	}
	if len(names) == 0 {
		return fmt.Errorf("session %d of replica %s, its last, lists no running create: it was killed too late",
			session.GetSequence(), victim.Replica)
	}
	s.detailf("its last session message, number %d, lists %d running creates: %s",
		session.GetSequence(), len(names), strings.Join(names, ", "))
	s.detailf("the cloud has created the instances of all of them, but mcm does not know that")
	if err := s.cloud.Hold(ctx); err != nil {
		return err
	}
	s.detailf("the cloud answers again")
	return nil
}

// checkCloud counts the instances that the cloud created, by its own log.
func (s *setup) checkCloud(ctx context.Context) error {
	created, err := s.cloud.Created(ctx)
	if err != nil {
		return err
	}
	machines := map[string]bool{}
	for _, entry := range created {
		machines[entry.MachineUID] = true
	}
	s.detailf("the cloud's log: %d instances created, for %d different machines", len(created), len(machines))
	if len(created) != machineCount || len(machines) != machineCount {
		return fmt.Errorf("the cloud created %d instances for %d machines, instead of exactly one for each of %d",
			len(created), len(machines), machineCount)
	}
	return nil
}

// checkKilled follows the operations that the killed replica ran to their end.
func (s *setup) checkKilled(ctx context.Context) error {
	ended := map[string]*driverv1.Audit{}
	err := stack.Poll(ctx, "the outcomes of the killed replica's creates are on the bus", func(context.Context) error {
		for _, audit := range s.tap.Audits() {
			ended[audit.GetOperationId()] = audit
		}
		for _, id := range s.killed {
			if ended[id] == nil {
				return fmt.Errorf("no outcome of %s", id)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, id := range s.killed {
		audit := ended[id]
		s.detailf("the killed replica's create of %s: %s on replica %s, attempt %d",
			audit.GetName(), bus.CodeName(audit.GetStatus().GetCode()), audit.GetReplica(), audit.GetAttempts())
		switch {
		case audit.GetStatus().GetCode() != driverv1.Code_CODE_OK:
			return fmt.Errorf("create of %s: %s", audit.GetName(), audit.GetStatus().GetMessage())
		case audit.GetReplica() == s.victim.Replica || audit.GetAttempts() < 2:
			return fmt.Errorf("create of %s did not move from the killed replica to the other one", audit.GetName())
		}
	}
	return nil
}
