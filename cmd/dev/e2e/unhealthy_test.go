package e2e

import (
	"context"
	"fmt"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestPoolLosesItsNodes makes all Nodes of a pool unhealthy for good: its machines
// are replaced one after the other, as if each were the only one.
func TestPoolLosesItsNodes(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	e.startDrivers(1, manager.NATSURL, tap)
	e.createClass()
	d := e.newPoolObject()
	const replicas = 3
	d.Spec.Replicas = replicas
	d.Spec.Template.Spec.MachineHealthTimeout = &metav1.Duration{Duration: time.Second}
	e.must(e.kube.Create(e.ctx(), d))
	e.eventually("the pool is there", func(ctx context.Context) error { return e.poolHas(ctx, d, replicas) })
	names, err := e.machineNames(e.ctx())
	e.must(err)
	for _, name := range names {
		e.breakNode(name)
	}
	most := 0
	e.eventually("all machines are replaced", func(ctx context.Context) error {
		machines, err := e.machines(ctx)
		if err != nil {
			return err
		}
		leaving, left := 0, 0
		for _, m := range machines {
			if m.Status.CurrentStatus.Phase == v1alpha1.MachineFailed || m.DeletionTimestamp != nil {
				leaving++
			}
		}
		most = max(most, leaving)
		for _, name := range names {
			if machines[name] != nil {
				left++
			}
		}
		if left > 0 {
			return fmt.Errorf("%d are left", left)
		}
		return nil
	})
	if most > 1 {
		t.Errorf("%d machines were replaced at a time", most)
	}
	e.eventually("the pool is whole", func(ctx context.Context) error { return e.poolHas(ctx, d, replicas) })
	delayed := 0
	for _, name := range names {
		events, err := e.events(e.ctx(), name)
		e.must(err)
		for _, event := range events {
			if event.Reason == "ReplacementDelayed" {
				delayed++
			}
		}
	}
	if delayed != replicas-1 {
		t.Errorf("%d machines said that they had to wait, want %d", delayed, replicas-1)
	}
	e.wantMachinesOnly()
}

// TestUnwatchedMachines kills mcm, and sets its Lease back by an hour, as if the API
// server had been away for so long: the next mcm restarts the timeouts of unhealthy
// machines.
func TestUnwatchedMachines(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("", "--leader-elect=true", "--leader-elect-lease-duration=2s",
		"--leader-elect-renew-deadline=1500ms", "--leader-elect-retry-period=500ms")
	e.startDrivers(1, manager.NATSURL, tap)
	e.createClass()
	names := e.createMachines(1, className)
	e.waitRunning(names...)
	e.breakNode(names[0])
	e.waitPhase(v1alpha1.MachineUnknown, names)
	e.must(manager.Kill())

	e.setLeaseBack(e.longUnknown(names[0]))
	e.must(manager.Restart(e.ctx()))
	e.wantTimeoutReset(names[0])
	e.wantTidyMetrics(manager.Address, "mcm_machine_controller_frozen")
	e.deleteAll(names...)
}

// TestFreezeAcrossRestart keeps mcm from the target cluster, and kills it meanwhile:
// the next mcm restarts the timeouts of unhealthy machines.
func TestFreezeAcrossRestart(t *testing.T) {
	e := newEnv(t)
	gate, target := e.openKubeGate()
	manager, tap := e.startManager("", "--target-kubeconfig="+target, "--leader-elect=true", "--leader-elect-lease-duration=2s",
		"--leader-elect-renew-deadline=1500ms", "--leader-elect-retry-period=500ms",
		"--machine-safety-apiserver-statuscheck-timeout=10s", "--machine-safety-apiserver-statuscheck-period=10s")
	e.startDrivers(1, manager.NATSURL, tap)
	e.createClass()
	names := e.createMachines(1, className)
	e.waitRunning(names...)
	e.breakNode(names[0])
	e.waitPhase(v1alpha1.MachineUnknown, names)

	gate.setShut(true)
	e.waitFrozen("true")
	e.waitEvent(names[0], corev1.EventTypeWarning, "only deletions go on: read from the API server of the target cluster")
	e.must(manager.Kill())
	gate.setShut(false)
	e.longUnknown(names[0])
	e.must(manager.Restart(e.ctx()))
	e.wantTimeoutReset(names[0])
	e.waitEvent(names[0], corev1.EventTypeNormal, "health timeouts start again")
	e.waitFrozen("false")
	e.deleteAll(names...)
}

// longUnknown has a machine's status say that it is Unknown since an hour ago, which
// it returns.
func (e *env) longUnknown(name string) (hourAgo time.Time) {
	e.Helper()
	hourAgo = time.Now().Add(-time.Hour).UTC()
	m, err := e.machine(e.ctx(), name)
	e.must(err)
	before := m.DeepCopy()
	m.Status.CurrentStatus.LastUpdateTime = metav1.NewTime(hourAgo)
	e.must(e.kube.Status().Patch(e.ctx(), m, client.MergeFrom(before)))
	return hourAgo
}

// wantTimeoutReset waits until the timeout of a machine that longUnknown has changed is
// restarted, and requires that it was never Failed.
func (e *env) wantTimeoutReset(name string) {
	e.Helper()
	e.waitEvent(name, corev1.EventTypeNormal, v1alpha1.TextHealthTimeoutReset)
	e.eventually("its time starts again", func(ctx context.Context) error {
		m, err := e.machine(ctx, name)
		if err == nil && (m.Status.CurrentStatus.Phase != v1alpha1.MachineUnknown || time.Since(m.Status.CurrentStatus.LastUpdateTime.Time) > 30*time.Minute) {
			err = fmt.Errorf("its status is %+v", m.Status.CurrentStatus)
		}
		return err
	})
	events, err := e.events(e.ctx(), name)
	e.must(err)
	for _, event := range events {
		if event.Reason == "HealthTimeout" {
			e.Errorf("the machine was Failed: %s", event.Message)
		}
	}
}

// waitFrozen waits until mcm's Lease says whether machines are frozen.
func (e *env) waitFrozen(want string) {
	e.Helper()
	e.eventually("the Lease says that machines are frozen: "+want, func(ctx context.Context) error {
		lease := &coordinationv1.Lease{}
		err := e.kube.Get(ctx, client.ObjectKey{Namespace: e.name, Name: "machine-controller-manager"}, lease)
		if got := lease.Labels["machinebus.io/frozen"]; err == nil && got != want {
			err = fmt.Errorf("it says %q", got)
		}
		return err
	})
}

// setLeaseBack has mcm's Lease say that it was last renewed at some time.
func (e *env) setLeaseBack(at time.Time) {
	e.Helper()
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: e.name, Name: "machine-controller-manager"}}
	patch := fmt.Appendf(nil, `{"spec":{"renewTime":%q}}`, at.Format("2006-01-02T15:04:05.000000Z07:00"))
	e.must(e.kube.Patch(e.ctx(), lease, client.RawPatch("application/merge-patch+json", patch)))
}
