package e2e

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	create  = driverv1.Operation_OPERATION_CREATE
	destroy = driverv1.Operation_OPERATION_DELETE
)

// TestStory is what the demo shows: ten machines are made by two replicas, one of
// which is killed in the middle, and are deleted again.
func TestStory(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	drivers := e.startDrivers(2, manager.NATSURL, tap)
	e.createClass()
	const machines = 10
	e.must(e.cloud.Hold(e.ctx(), "*"))
	names := e.createMachines(machines, className)
	e.waitHeld(machines, tap, drivers)

	victim, survivor := drivers[0], drivers[1]
	if len(tap.Running(victim.Replica, create)) == 0 {
		victim, survivor = survivor, victim
	}
	e.must(victim.Kill())
	killed := tap.Running(victim.Replica, create)
	if len(killed) == 0 {
		t.Fatalf("the last session of replica %s lists no running create", victim.Replica)
	}
	e.must(e.cloud.Hold(e.ctx()))
	e.waitRunning(names...)

	e.wantInstances(machines)
	e.wantMoved(tap, killed, survivor)
	for _, name := range names {
		e.wantJoined(name)
	}
	e.deleteAll(names...)
	e.wantInstances(machines) // none was made again meanwhile
}

// waitHeld waits until the replicas' sessions list n running creates.
func (e *env) waitHeld(n int, tap *stack.Tap, drivers []*stack.Driver) {
	e.Helper()
	e.eventually("all creates are with a replica", func(context.Context) error {
		held := 0
		for _, d := range drivers {
			held += len(tap.Running(d.Replica, create))
		}
		if held != n {
			return fmt.Errorf("%d are, want %d", held, n)
		}
		return nil
	})
}

// waitEnded waits for the audit message of each of these operations.
func (e *env) waitEnded(tap *stack.Tap, ids []string) map[string]*driverv1.Audit {
	e.Helper()
	ended := map[string]*driverv1.Audit{}
	e.eventually("audit messages have the outcomes of the operations", func(context.Context) error {
		for _, audit := range tap.Audits() {
			ended[audit.GetOperationId()] = audit
		}
		for _, id := range ids {
			if ended[id] == nil {
				return fmt.Errorf("there is none about %s", id)
			}
		}
		return nil
	})
	return ended
}

// wantMoved expects that operations of a dead replica succeeded on another one.
func (e *env) wantMoved(tap *stack.Tap, ids []string, to *stack.Driver) {
	e.Helper()
	ended := e.waitEnded(tap, ids)
	for _, id := range ids {
		audit := ended[id]
		if audit.GetStatus().GetCode() != driverv1.Code_CODE_OK || audit.GetReplica() != to.Replica || audit.GetAttempts() < 2 {
			e.Errorf("operation %s of the killed replica: %s on replica %s, attempt %d (%s); want OK on %s, attempt 2 or more",
				id, audit.GetStatus().GetCode(), audit.GetReplica(), audit.GetAttempts(), audit.GetStatus().GetMessage(), to.Replica)
		}
	}
}

// wantJoined checks everything that users of Machine objects look at.
func (e *env) wantJoined(name string) {
	e.Helper()
	m := e.wantLinked(name)
	e.waitEvent(name, corev1.EventTypeNormal, "Created instance "+m.Spec.ProviderID)
	e.waitEvent(name, corev1.EventTypeNormal, "joined the cluster")
}

// wantLinked checks that a Running machine and its Node know each other, and
// returns the machine.
func (e *env) wantLinked(name string) *v1alpha1.Machine {
	e.Helper()
	m, err := e.machine(e.ctx(), name)
	e.must(err)
	node := &corev1.Node{}
	e.must(e.kube.Get(e.ctx(), client.ObjectKey{Name: m.Labels[v1alpha1.LabelKeyNode]}, node))
	type facts struct {
		Node, ProviderID string
		Finalizers       []string
		MachineOfNode    string
		Operation        v1alpha1.MachineOperationType
		State            v1alpha1.MachineState
	}
	got := facts{
		Node: m.Labels[v1alpha1.LabelKeyNode], ProviderID: m.Spec.ProviderID, Finalizers: m.Finalizers,
		MachineOfNode: node.Labels[v1alpha1.LabelKeyMachineName],
		Operation:     m.Status.LastOperation.Type, State: m.Status.LastOperation.State,
	}
	want := facts{
		Node: node.Name, ProviderID: node.Spec.ProviderID, Finalizers: []string{v1alpha1.FinalizerName},
		MachineOfNode: name,
		Operation:     v1alpha1.MachineOperationCreate, State: v1alpha1.MachineStateSuccessful,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		e.Errorf("machine %s (-want +got):\n%s", name, diff)
	}
	if m.Spec.ProviderID == "" {
		e.Errorf("machine %s has no provider id", name)
	}
	return m
}

// TestNoDriverAtFirst shows the user what is missing, and needs no help once it
// is there.
func TestNoDriverAtFirst(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	e.createClass()
	names := e.createMachines(1, className)
	e.waitEvent(names[0], corev1.EventTypeWarning, "no driver for provider virtual")
	e.eventually("the machine says what it waits for", func(ctx context.Context) error {
		m, err := e.machine(ctx, names[0])
		if err == nil && m.Status.LastOperation.Description == "" {
			err = errors.New("its last operation has no description")
		}
		return err
	})

	e.startDrivers(1, manager.NATSURL, tap)
	e.waitRunning(names...)
	e.wantInstances(1)
	e.deleteAll(names...)
}

// TestBothReplicasServe counts whose work the machines are.
func TestBothReplicasServe(t *testing.T) {
	const machines, slots = 40, 8
	e := newEnv(t)
	manager, tap := e.startManager("")
	// With fewer slots than there is work, chance cannot give it all to one.
	drivers := e.startDrivers(2, manager.NATSURL, tap, fmt.Sprintf("--slots=%d", slots))
	e.createClass()
	names := e.createMachines(machines, className)
	e.waitRunning(names...)
	e.wantInstances(machines)

	var share map[string]int
	e.eventually("audit messages name the replicas of the creates", func(context.Context) error {
		share = map[string]int{}
		audited := 0
		for _, audit := range tap.Audits() {
			if audit.GetOperation() == create && audit.GetStatus().GetCode() == driverv1.Code_CODE_OK {
				share[audit.GetReplica()]++
				audited++
			}
		}
		if audited != machines {
			return fmt.Errorf("%d of %d have an audit message", audited, machines)
		}
		return nil
	})
	for _, d := range drivers {
		if share[d.Replica] < machines/4 {
			t.Errorf("replica %s did %d of %d creates, want at least a quarter (all: %v)", d.Replica, share[d.Replica], machines, share)
		}
	}
	e.deleteAll(names...)
}
