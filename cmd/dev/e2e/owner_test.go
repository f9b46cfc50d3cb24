package e2e

import (
	"context"
	"errors"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// collecting has a manager look for instances without a machine often.
var collecting = []string{"--machine-safety-orphan-vms-period=200ms", "--machine-safety-orphan-vms-grace=2s"}

// newNamesake makes an env of another control cluster, with the name, the namespace
// and the cloud of a.
func newNamesake(a *env) *env {
	a.Helper()
	b := newBareEnv(a.T)
	b.name, b.cloud = a.name, a.cloud
	var err error
	b.cluster, b.kube, err = startCluster(b.ctx(), b.site)
	b.must(err)
	b.createNamespace()
	return b
}

// waitMade waits until machines have an instance, which need not join.
func (e *env) waitMade(names ...string) {
	e.Helper()
	e.eventually("all machines have an instance", func(ctx context.Context) error {
		for _, name := range names {
			if m, err := e.machine(ctx, name); err != nil || m.Spec.ProviderID == "" {
				return errors.Join(err, fmt.Errorf("%s has none", name))
			}
		}
		return nil
	})
}

// TestNamesakesOnOneCloud has two control planes of one name, each on a bus of its own,
// share a cloud account: only the owner of an instance distinguishes them. Each
// deletes its own instance without a machine and none of the other's.
func TestNamesakesOnOneCloud(t *testing.T) {
	a := newEnv(t)
	b := newNamesake(a)
	managerA, tapA := a.startManager("", collecting...)
	managerB, tapB := b.startManager("", collecting...)
	a.startDrivers(1, managerA.NATSURL, tapA)
	b.startDrivers(1, managerB.NATSURL, tapB)
	a.createClass()
	b.createClass()
	namesA := a.createMachines(3, className)
	nameB := b.name + "-b" // too few to make the majority of its class
	b.createMachine(nameB, className)
	a.waitRunning(namesA...)
	b.waitMade(nameB)

	// Each has looked for longer than its grace period when its own one is gone.
	cloud, err := cloudapi.NewClient(a.cloud.Endpoint, a.cloud.APIToken)
	a.must(err)
	for _, e := range []*env{a, b} {
		orphan := e.plant(cloud, "orphan-"+e.owner()[:8])
		e.eventually("its orphan is gone", func(ctx context.Context) error { return e.absent(ctx, cloud, orphan.ID) })
		e.waitClassEvent(corev1.EventTypeWarning, "another owner")
	}
	live, err := a.cloud.Instances(a.ctx())
	a.must(err)
	if want := len(namesA) + 1; len(live) != want {
		t.Errorf("%d instances live, want the %d of both control planes", len(live), want)
	}
}

// TestNamesakeIsHeard has a second control plane of the same name come to the bus. While
// it is heard, no operation is sent and no instance deleted; then all goes on.
func TestNamesakeIsHeard(t *testing.T) {
	a := newEnv(t)
	b := newNamesake(a)
	nats, err := a.site.StartNATS(a.ctx())
	a.must(err)
	manager, tap := a.startManager(nats.URL, collecting...)
	a.startDrivers(1, nats.URL, tap)
	a.createClass()
	first := a.createMachines(1, className)[0]
	a.waitRunning(first)

	a.must(manager.Pause()) // or the other one would never say that it is ready
	other, _ := b.startManager(nats.URL)
	a.must(manager.Resume())
	a.eventually("the manager is not ready", func(ctx context.Context) error {
		if manager.Ready(ctx) == nil {
			return errors.New("it is")
		}
		return nil
	})
	second := a.name + "-second"
	a.createMachine(second, className)
	cloud, err := cloudapi.NewClient(a.cloud.Endpoint, a.cloud.APIToken)
	a.must(err)
	orphan := a.plant(cloud, "orphan")
	a.waitEvent(second, corev1.EventTypeWarning, "give each its own --cluster-name")
	barred := func() float64 { return a.counter(manager, "mcm_safety_orphan_passes_total", `outcome="barred"`) }
	before := barred()
	const many = 20 // looks, which take longer than the grace period
	a.eventually("there were many more looks", func(context.Context) error { return atLeast(barred(), before+many) })
	if m, err := a.machine(a.ctx(), second); err != nil || m.Spec.ProviderID != "" {
		t.Errorf("machine %s got instance %q: %v", second, m.Spec.ProviderID, err)
	}
	if _, err := cloud.Get(a.ctx(), orphan.ID); err != nil {
		t.Errorf("instance %s without a machine: %v", orphan.ID, err)
	}

	a.must(other.Stop())
	a.waitRunning(second)
	a.eventually("the orphan is gone", func(ctx context.Context) error { return a.absent(ctx, cloud, orphan.ID) })
	a.eventually("the manager is ready", manager.Ready)
}

// TestOtherManagerIsHeard has a second manager of the same cluster, name and namespace lead
// on one bus, as after a cluster was cloned: neither collects what may be the other's.
func TestOtherManagerIsHeard(t *testing.T) {
	e := newEnv(t)
	nats, err := e.site.StartNATS(e.ctx())
	e.must(err)
	first, tap := e.startManager(nats.URL, collecting...)
	drivers := e.startDrivers(1, nats.URL, tap)
	e.createClass()
	e.waitRunning(e.createMachines(1, className)...)
	before := e.waitEpoch(tap, drivers, 1)
	e.must(first.Pause()) // or it might raise its epoch first, and the other one would never say that it is ready
	second, err := e.site.StartManager(e.ctx(), stack.ManagerOptions{
		Name: "second", Control: e.cluster.Kubeconfig, Namespace: e.name, Cluster: e.name, NATSURL: nats.URL, Args: collecting,
	})
	e.must(err)
	e.waitEpoch(tap, drivers, before+1)
	e.must(first.Resume())
	cloud, err := cloudapi.NewClient(e.cloud.Endpoint, e.cloud.APIToken)
	e.must(err)
	barred := func() float64 { return e.counter(second, "mcm_safety_orphan_passes_total", `outcome="barred"`) }
	e.eventually("the second manager hears the first", func(context.Context) error { return atLeast(barred(), 1) })
	orphan := e.plant(cloud, "orphan")
	last := barred()
	const many = 20 // looks, which take longer than the grace period
	e.eventually("there were many more looks", func(context.Context) error { return atLeast(barred(), last+many) })
	if _, err := cloud.Get(e.ctx(), orphan.ID); err != nil {
		t.Errorf("instance %s without a machine: %v", orphan.ID, err)
	}
	e.must(first.Stop())
	e.eventually("the orphan is gone", func(ctx context.Context) error { return e.absent(ctx, cloud, orphan.ID) })
}

// TestMachineNameIsUsedAgain has a machine come whose name an earlier machine's instance
// still has, in a cloud that knows each name once.
func TestMachineNameIsUsedAgain(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("", append([]string{"--retry-medium=1s"}, collecting...)...)
	e.startDrivers(1, manager.NATSURL, tap, "--identity=unique_name")
	e.createClass()
	cloud, err := cloudapi.NewClient(e.cloud.Endpoint, e.cloud.APIToken)
	e.must(err)
	earlier := e.plantFor(cloud, e.name+"-again", "earlier-uid", "earlier")
	e.createMachine(earlier.Name, className)
	e.waitEvent(earlier.Name, corev1.EventTypeWarning, "orphan collection deletes it")
	e.waitRunning(earlier.Name)
	e.waitEvent(earlier.Name, corev1.EventTypeNormal, "is gone")
	e.must(e.absent(e.ctx(), cloud, earlier.ID))
	m, err := e.machine(e.ctx(), earlier.Name)
	e.must(err)
	if m.Status.CurrentStatus.Phase != v1alpha1.MachineRunning {
		t.Errorf("phase %s", m.Status.CurrentStatus.Phase)
	}
}
