package e2e

import (
	"context"
	"errors"
	"fmt"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// TestEpochBack takes the Lease away that mcm counts epochs with, or sets it back, as
// the restore of a backup does: drivers that know a higher epoch make machines all
// the same, without being restarted.
func TestEpochBack(t *testing.T) {
	e := newEnv(t)
	nats, err := e.site.StartNATS(e.ctx())
	e.must(err)
	e.createLease(e.name, 50)
	manager, tap := e.startManager(nats.URL, "--leader-elect=true", "--leader-elect-lease-duration=2s",
		"--leader-elect-renew-deadline=1500ms", "--leader-elect-retry-period=500ms")
	drivers := e.startDrivers(2, nats.URL, tap)
	e.createClass()
	known := e.waitEpoch(tap, drivers, 52)
	e.waitRunning(e.createMachines(1, className)...)

	for what, back := range map[string]func(){
		"the Lease is deleted": func() {
			e.must(manager.Kill())
			e.deleteLease()
			e.must(manager.Restart(e.ctx()))
		},
		"the Lease is set back": func() {
			e.must(manager.Kill())
			e.setTransitions(0)
			e.must(manager.Restart(e.ctx()))
		},
		"the Lease of a leader is deleted":  e.deleteLease,
		"the Lease of a leader is set back": func() { e.setTransitions(0) },
	} {
		back()
		name := e.name + "-after-" + fmt.Sprint(len(what))
		e.createMachine(name, className)
		e.waitRunning(name)
		e.eventually("the Lease counts all that drivers know, after "+what, func(ctx context.Context) error {
			lease := &coordinationv1.Lease{}
			if err := e.kube.Get(ctx, e.leaseKey(), lease); err != nil {
				return err
			}
			if got := *lease.Spec.LeaseTransitions; uint64(got)+1 < known {
				return fmt.Errorf("it counts %d, and drivers know epoch %d", got, known)
			}
			return nil
		})
		known = e.waitEpoch(tap, drivers, known)
	}
}

// TestStrayManager has a second manager of the control plane's name, with a higher
// epoch, for a while. The first one says so by not being ready, and leads the drivers
// again by itself once the other one has gone.
func TestStrayManager(t *testing.T) {
	e := newEnv(t)
	other := newPlane(t, e.cloud)
	nats, err := e.site.StartNATS(e.ctx())
	e.must(err)
	e.createLease(other.name, 500)
	stray, err := e.site.StartManager(e.ctx(), stack.ManagerOptions{
		Name: "stray", Control: e.cluster.Kubeconfig, Namespace: other.name, Cluster: e.name, NATSURL: nats.URL,
	})
	e.must(err)
	e.must(stray.Kill()) // it is ready only while it is alone
	manager, tap := e.startManager(nats.URL)
	drivers := e.startDrivers(2, nats.URL, tap)
	e.createClass()
	e.waitRunning(e.createMachines(1, className)...)

	process, err := e.site.Restart(stray.Process)
	e.must(err)
	known := e.waitEpoch(tap, drivers, 501)
	e.eventually("the first manager is not ready", func(ctx context.Context) error {
		if manager.Ready(ctx) == nil {
			return errors.New("it is")
		}
		return nil
	})
	e.must(process.Kill())
	late := e.name + "-late"
	e.createMachine(late, className)
	e.waitRunning(late)
	if now := e.waitEpoch(tap, drivers, known+1); now <= known {
		t.Errorf("drivers are led with epoch %d, that of the stray manager was %d", now, known)
	}
	e.eventually("the first manager is ready again", manager.Ready)
}

func (e *env) leaseKey() client.ObjectKey {
	return client.ObjectKey{Namespace: e.name, Name: "machine-controller-manager"}
}

// createLease makes the Lease of a manager that has yet to start, and that counts on
// from there.
func (e *env) createLease(namespace string, transitions int32) {
	e.Helper()
	e.must(e.kube.Create(e.ctx(), &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: e.leaseKey().Name},
		Spec:       coordinationv1.LeaseSpec{LeaseTransitions: &transitions},
	}))
}

func (e *env) deleteLease() {
	e.Helper()
	key := e.leaseKey()
	e.must(e.kube.Delete(e.ctx(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}}))
}

// setTransitions has the Lease count from elsewhere.
func (e *env) setTransitions(n int32) {
	e.Helper()
	key := e.leaseKey()
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}}
	patch := fmt.Appendf(nil, `{"spec":{"leaseTransitions":%d}}`, n)
	e.must(e.kube.Patch(e.ctx(), lease, client.RawPatch("application/merge-patch+json", patch)))
}
