package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// otherClass is what a pool is rolled to.
const otherClass = "large"

// A pool is a MachineDeployment of an env with all that serves it.
type pool struct {
	*env

	name    string
	tap     *stack.Tap
	nats    string
	drivers []*stack.Driver
	lost    int // drivers
}

// newPool makes the pool of deploy/examples, without machines.
func newPool(e *env, nats string, tap *stack.Tap) *pool {
	e.Helper()
	p := &pool{env: e, name: e.name, tap: tap, nats: nats, drivers: e.startDrivers(2, nats, tap)}
	e.createClass()
	e.must(e.kube.Create(e.ctx(), e.newSecret(otherClass)))
	e.must(e.kube.Create(e.ctx(), e.newClass(otherClass, nil)))
	e.must(e.kube.Create(e.ctx(), e.newPoolObject()))
	return p
}

// newPoolObject returns the pool of deploy/examples, with the env's name and no
// machines.
func (e *env) newPoolObject() *v1alpha1.MachineDeployment {
	e.Helper()
	objects, err := stack.LoadYAML("../../../deploy/examples/pool/machinedeployment.yaml")
	e.must(err)
	d := &v1alpha1.MachineDeployment{}
	e.must(runtime.DefaultUnstructuredConverter.FromUnstructured(objects[0].Object, d))
	labels := map[string]string{v1alpha1.LabelKeyMachineDeployment: e.name}
	d.Name, d.Namespace, d.Spec.Replicas = e.name, e.name, 0
	d.Spec.Selector.MatchLabels, d.Spec.Template.Labels = labels, labels
	d.Spec.Template.Spec.Class.Name = className
	return d
}

func (p *pool) get(ctx context.Context) (*v1alpha1.MachineDeployment, error) {
	d := &v1alpha1.MachineDeployment{}
	return d, p.kube.Get(ctx, client.ObjectKey{Namespace: p.env.name, Name: p.name}, d)
}

func (p *pool) change(f func(*v1alpha1.MachineDeploymentSpec)) {
	p.Helper()
	d, err := p.get(p.ctx())
	p.must(err)
	before := d.DeepCopy()
	f(&d.Spec)
	p.must(p.kube.Patch(p.ctx(), d, client.MergeFrom(before)))
}

// scale uses the scale subresource, as `kubectl scale` and autoscalers do.
func (p *pool) scale(replicas int) {
	p.Helper()
	d, err := p.get(p.ctx())
	p.must(err)
	patch := fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas)
	p.must(p.kube.SubResource("scale").Patch(p.ctx(), d, client.RawPatch("application/merge-patch+json", patch)))
}

// settled waits until the pool says that it has its replicas, all of one class,
// and the cloud has an instance for each Machine and no other.
func (p *pool) settled(replicas int, class string) {
	p.Helper()
	p.eventually(fmt.Sprintf("the pool has %d machines of class %s", replicas, class), func(ctx context.Context) error {
		d, err := p.get(ctx)
		if err != nil {
			return err
		}
		if err := settledIn(d, replicas); err != nil {
			return err
		}
		return p.instancesMatch(ctx, replicas, class)
	})
}

// settledIn returns an error unless a deployment's status shows so many
// machines, all of its template, in just the conditions that others look for.
func settledIn(d *v1alpha1.MachineDeployment, replicas int) error {
	var conditions []string
	for _, c := range d.Status.Conditions {
		conditions = append(conditions, fmt.Sprintf("%s=%s/%s", c.Type, c.Status, c.Reason))
	}
	slices.Sort(conditions)
	want := []string{"Available=True/MinimumReplicasAvailable", "Progressing=True/NewMachineSetAvailable"}
	if s := d.Status; s.ObservedGeneration != d.Generation || int(d.Spec.Replicas) != replicas ||
		int(s.AvailableReplicas) != replicas || int(s.Replicas) != replicas || int(s.UpdatedReplicas) != replicas ||
		!slices.Equal(want, conditions) {
		return fmt.Errorf("want %d of spec %d; status %+v, conditions %v", replicas, d.Spec.Replicas, s, conditions)
	}
	return nil
}

// instancesMatch fails unless there are n Machines, all of the class, and just
// their instances.
func (p *pool) instancesMatch(ctx context.Context, n int, class string) error {
	list := &v1alpha1.MachineList{}
	if err := p.kube.List(ctx, list, client.InNamespace(p.env.name)); err != nil {
		return err
	}
	var machines, instances []string
	for i := range list.Items {
		m := &list.Items[i]
		if m.Spec.Class.Name != class || m.Status.CurrentStatus.Phase != v1alpha1.MachineRunning {
			return fmt.Errorf("machine %s of class %s is %s", m.Name, m.Spec.Class.Name, m.Status.CurrentStatus.Phase)
		}
		machines = append(machines, m.Name)
	}
	live, err := p.cloud.Instances(ctx)
	if err != nil {
		return err
	}
	for i := range live {
		instances = append(instances, live[i].Name)
	}
	slices.Sort(machines)
	slices.Sort(instances)
	if diff := cmp.Diff(machines, instances); diff != "" || len(machines) != n {
		return fmt.Errorf("want %d machines and their instances; -machines +instances:\n%s\nof %v", n, diff, machines)
	}
	return nil
}

// delete asks for the pool's deletion.
func (p *pool) delete() {
	p.Helper()
	d, err := p.get(p.ctx())
	p.must(err)
	p.must(p.kube.Delete(p.ctx(), d))
}

// gone waits until nothing is left of the pool.
func (p *pool) gone() {
	p.Helper()
	p.eventually("nothing is left of the pool", func(ctx context.Context) error {
		if _, err := p.get(ctx); client.IgnoreNotFound(err) != nil || err == nil {
			return errors.Join(err, errors.New("the deployment is there"))
		}
		return p.instancesMatch(ctx, 0, "")
	})
	nodes := &corev1.NodeList{}
	p.must(p.kube.List(p.ctx(), nodes))
	for i := range nodes.Items {
		if strings.HasPrefix(nodes.Items[i].Name, p.name+"-") {
			p.Errorf("node %s is left", nodes.Items[i].Name)
		}
	}
}

// A mishap befalls a pool while it works on something.
type mishap func(*pool)

// life is what happens to a pool, with a mishap in each part.
func (p *pool) life(happen mishap) {
	p.Helper()
	class := func(name string) func(*v1alpha1.MachineDeploymentSpec) {
		return func(s *v1alpha1.MachineDeploymentSpec) { s.Template.Spec.Class.Name = name }
	}
	paused := func(on bool) func(*v1alpha1.MachineDeploymentSpec) {
		return func(s *v1alpha1.MachineDeploymentSpec) { s.Paused = on }
	}
	p.settled(0, className)
	p.scale(1)
	p.settled(1, className)
	p.inCreate(happen, func() { p.scale(6) })
	p.settled(6, className)
	p.inDelete(happen, func() { p.scale(2) })
	p.settled(2, className)

	p.change(func(s *v1alpha1.MachineDeploymentSpec) { s.Replicas = 4 })
	p.settled(4, className)
	p.inCreate(happen, func() { p.change(class(otherClass)) })
	p.settled(4, otherClass)
	p.inDelete(happen, func() {
		p.change(func(s *v1alpha1.MachineDeploymentSpec) { s.RollbackTo = &v1alpha1.RollbackConfig{} })
	})
	p.settled(4, className)

	p.must(p.cloud.Hold(p.ctx(), "*"))
	p.change(class(otherClass))
	p.eventually("the rollout is under way", func(ctx context.Context) error { return p.machinesOf(ctx, otherClass, 2) })
	p.change(paused(true))
	p.must(p.cloud.Hold(p.ctx()))
	p.scale(5) // one more than that is allowed, and goes to the new set
	p.eventually("the paused pool is scaled", func(ctx context.Context) error {
		return errors.Join(p.machinesOf(ctx, className, 3), p.machinesOf(ctx, otherClass, 3))
	})
	happen(p)
	p.change(paused(false))
	p.settled(5, otherClass)
	p.inDelete(happen, p.delete)
	p.gone()
}

// inCreate has something happen while creates are under way that change leads to.
func (p *pool) inCreate(happen mishap, change func()) {
	p.Helper()
	p.must(p.cloud.Hold(p.ctx(), "*"))
	change()
	p.working(create)
	happen(p)
	p.must(p.cloud.Hold(p.ctx()))
}

// inDelete has something happen while deletes are under way that change leads to.
func (p *pool) inDelete(happen mishap, change func()) {
	p.Helper()
	p.slowDeletes(3 * time.Second) // none can be held
	change()
	p.working(destroy)
	happen(p)
	p.slowDeletes(0)
}

// slowDeletes makes the cloud take so long to end an instance.
func (e *env) slowDeletes(latency time.Duration) {
	e.Helper()
	knob := cloudapi.Duration(latency)
	_, err := e.cloud.Admin.Patch(e.ctx(), cloudapi.KnobsPatch{DeleteLatency: &knob})
	e.must(err)
}

// working waits until a replica lists a running operation of a kind.
func (p *pool) working(kind driverv1.Operation) {
	p.Helper()
	p.eventually("a replica has a "+kind.String(), func(context.Context) error {
		for _, d := range p.drivers {
			if len(p.tap.Running(d.Replica, kind)) > 0 {
				return nil
			}
		}
		return errors.New("none has")
	})
}

// machinesOf fails unless there are n machines of a class.
func (p *pool) machinesOf(ctx context.Context, class string, n int) error {
	list := &v1alpha1.MachineList{}
	if err := p.kube.List(ctx, list, client.InNamespace(p.env.name)); err != nil {
		return err
	}
	found := 0
	for i := range list.Items {
		if list.Items[i].Spec.Class.Name == class {
			found++
		}
	}
	if found != n {
		return fmt.Errorf("there are %d machines of class %s, want %d", found, class, n)
	}
	return nil
}

// loseDriver kills the replica that has the most to do, and starts another.
func (p *pool) loseDriver() {
	p.Helper()
	work := func(d *stack.Driver) int {
		return len(p.tap.Running(d.Replica, create)) + len(p.tap.Running(d.Replica, destroy))
	}
	victim := slices.MaxFunc(p.drivers, func(a, b *stack.Driver) int { return work(a) - work(b) })
	p.must(victim.Kill())
	p.lost++
	p.drivers = slices.DeleteFunc(p.drivers, func(d *stack.Driver) bool { return d == victim })
	d, err := p.site.StartDriver(p.ctx(), p.tap, stack.DriverOptions{
		Name: fmt.Sprintf("driver-virtual-%d", 2+p.lost), NATSURL: p.nats, Clusters: []string{p.env.name},
	})
	p.must(err)
	p.drivers = append(p.drivers, d)
}

// managers are an mcm that leads and, after standBy, one that waits for the lead.
type managers struct {
	*env

	nats            string
	args            []string
	leader, standby *stack.Manager
	started         int
}

// startManagers starts a bus and the first manager, which leads.
func (e *env) startManagers(args ...string) (*managers, *stack.Tap) {
	e.Helper()
	nats, err := e.site.StartNATS(e.ctx())
	e.must(err)
	m := &managers{env: e, nats: nats.URL, started: 1, args: append([]string{
		"--leader-elect=true", "--leader-elect-lease-duration=2s", "--leader-elect-renew-deadline=1500ms", "--leader-elect-retry-period=500ms",
	}, args...)}
	var tap *stack.Tap
	m.leader, tap = e.startManager(nats.URL, m.args...)
	return m, tap
}

// standBy starts a manager that waits for the lead. One must lead already.
func (m *managers) standBy() {
	m.Helper()
	m.started++
	var err error
	m.standby, err = m.site.StartManager(m.ctx(), stack.ManagerOptions{
		Name: fmt.Sprintf("mcm-%d", m.started), Control: m.cluster.Kubeconfig, Namespace: m.name, Cluster: m.name, NATSURL: m.nats,
		Args: append([]string{"-v=2"}, m.args...),
	})
	m.must(err)
}

// failOver kills the leader, for which one must stand by, and starts another.
func (m *managers) failOver() {
	m.Helper()
	m.must(m.leader.Kill())
	m.leader = m.standby
	m.standBy()
}

// TestPool takes a pool through its life.
func TestPool(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	newPool(e, manager.NATSURL, tap).life(func(*pool) {})
}

// TestPool_DriverKilled kills a replica in the middle of each part of it.
func TestPool_DriverKilled(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	newPool(e, manager.NATSURL, tap).life((*pool).loseDriver)
}

// TestPool_Failover kills the leading manager each time.
func TestPool_Failover(t *testing.T) {
	e := newEnv(t)
	m, tap := e.startManagers()
	p := newPool(e, m.nats, tap)
	p.settled(0, className) // the first one leads
	m.standBy()
	p.life(func(*pool) { m.failOver() })
}
