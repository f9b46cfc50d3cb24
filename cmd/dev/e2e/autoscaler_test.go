package e2e

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/autoscaler"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

// TestAutoscaler scales a pool up from nothing and down by just the named nodes,
// with all that happens meanwhile.
func TestAutoscaler(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	p := newPool(e, manager.NATSURL, tap)
	s := e.newScaler(manager.NATSURL)
	group := s.mark(p, "0", "6")
	for name, c := range s.strangers() {
		_, err := externalgrpc.NewCloudProviderClient(s.dial(c)).Refresh(e.ctx(), &externalgrpc.RefreshRequest{})
		s.wantCode("a client with "+name, err, codes.Unavailable)
	}

	s.must(s.increase(group, 6))
	if l, err := s.loop(e.ctx()); err != nil || l.target[group] != 6 {
		t.Fatalf("right after the increase: %v, %v", l, err)
	}
	nodes := s.joined(group, 6)
	s.wantCode("more than the maximum", s.increase(group, 1), codes.OutOfRange)

	// The autoscaler's list of instances is two minutes old at times: some have joined since.
	outdated := fake("requested://"+e.name+"/"+s.machineOf(nodes[0]), "unregistered")
	s.wantCode("one that has joined meanwhile", s.remove(group, outdated), codes.FailedPrecondition)

	foreign := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: e.name + "-foreign"}, Spec: corev1.NodeSpec{ProviderID: "elsewhere:///1"}}
	e.must(e.kube.Create(e.ctx(), foreign))
	t.Cleanup(func() { _ = e.kube.Delete(context.Background(), foreign) })
	s.eventuallyLook("the foreign node has no owner", func(l *look) error {
		if owner, ok := l.owner[foreign.Name]; !ok || owner != "" {
			return fmt.Errorf("it is %q's (%v)", owner, ok)
		}
		return nil
	})
	s.wantCode("a foreign node", s.remove(group, message(foreign)), codes.InvalidArgument)

	stays := []string{s.machineOf(nodes[0]), s.machineOf(nodes[5])}
	slices.Sort(stays)
	s.removeEach(group, nodes[1:5]...)                // within a second, while sets take up the changes before
	s.removeEach(group, nodes[1], nodes[2], nodes[1]) // as often as it likes
	p.settled(2, className)
	s.joined(group, 2)
	names, err := e.machineNames(e.ctx())
	if err != nil || !slices.Equal(names, stays) {
		t.Errorf("machines %v are left, %v; want those not named: %v", names, err, stays)
	}
	stats, err := e.cloud.Admin.Stats(e.ctx())
	s.must(err)
	if stats.Created != 6 {
		t.Errorf("%d instances were made, want 6: none in the place of one that had to go", stats.Created)
	}

	s.must(s.gateway.Kill())
	s.must(s.gateway.Restart(e.ctx()))
	s.eventually("the restarted gateway answers before any Refresh", s.start)
	s.eventuallyLook("the restarted gateway answers", func(l *look) error {
		if l.target[group] != 2 {
			return fmt.Errorf("target is %d", l.target[group])
		}
		return nil
	})

	invalid, err := p.get(e.ctx())
	s.must(err)
	before := invalid.DeepCopy()
	invalid.Annotations[autoscaler.AnnotationKeyMax] = "many"
	s.must(e.kube.Patch(e.ctx(), invalid, client.MergeFrom(before)))
	s.eventuallyLook("the pool is no group any more", func(l *look) error {
		if l.groups[group] != nil || slices.Contains(slices.Collect(maps.Values(l.owner)), group) {
			return fmt.Errorf("groups are %v, owners %v", l.groups, l.owner)
		}
		return nil
	})
	e.waitEventOf(v1alpha1.KindMachineDeployment, p.name, corev1.EventTypeWarning, "many")
	s.mark(p, "0", "6")
	s.must(s.increase(group, 1))
	s.joined(group, 3)
	p.settled(3, className)
}

// TestAutoscaler_RollingUpdate grows a pool in the middle of an update, which alone
// chooses what goes.
func TestAutoscaler_RollingUpdate(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	p := newPool(e, manager.NATSURL, tap)
	s := e.newScaler(manager.NATSURL)
	group := s.mark(p, "0", "6")
	s.must(s.increase(group, 3))
	nodes := s.joined(group, 3)
	p.settled(3, className)

	e.must(e.cloud.Hold(e.ctx(), "*"))
	p.change(func(d *v1alpha1.MachineDeploymentSpec) { d.Template.Spec.Class.Name = otherClass })
	e.eventually("the update is under way", func(ctx context.Context) error { return p.machinesOf(ctx, otherClass, 2) })
	_, err := s.loop(e.ctx())
	s.must(err)
	list := &v1alpha1.MachineList{}
	s.must(e.kube.List(e.ctx(), list, client.InNamespace(e.name)))
	refused := 0
	for _, n := range nodes {
		running := slices.ContainsFunc(list.Items, func(m v1alpha1.Machine) bool {
			return m.Labels[v1alpha1.LabelKeyNode] == n.GetName() && m.DeletionTimestamp.IsZero()
		})
		if running {
			refused++
			s.wantCode("a running node in an update", s.remove(group, n), codes.FailedPrecondition)
		}
	}
	if refused == 0 {
		t.Error("no node of before runs in the middle of the update")
	}
	s.must(s.increase(group, 1))
	e.must(e.cloud.Hold(e.ctx()))
	p.settled(4, otherClass)
	s.joined(group, 4)
}

// TestAutoscaler_NothingComes gives up machines that are to come: some that take
// long, and some for which the cloud has no room.
func TestAutoscaler_NothingComes(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("")
	p := newPool(e, manager.NATSURL, tap)
	s := e.newScaler(manager.NATSURL)
	group := s.mark(p, "0", "6")
	s.must(s.increase(group, 1))
	s.joined(group, 1)
	stays, err := e.machineNames(e.ctx())
	s.must(err)

	e.must(e.cloud.Hold(e.ctx(), "*"))
	s.must(s.increase(group, 3))
	s.waitState(group, 3, func(i *externalgrpc.InstanceStatus) bool {
		return i.GetInstanceState() == externalgrpc.InstanceStatus_instanceCreating
	})
	s.wantCode("more than are to come", s.decrease(group, 4), codes.FailedPrecondition)
	// The set would let the oldest one go; the gateway names the one to be missed least.
	youngest := s.youngest(stays)
	s.must(s.decrease(group, 1))
	s.eventually("the youngest one goes, and no other", func(ctx context.Context) error {
		going, err := s.going(ctx)
		if err == nil && !slices.Equal(going, []string{youngest}) {
			err = fmt.Errorf("%v go, want %s", going, youngest)
		}
		return err
	})
	s.must(s.decrease(group, 2))
	e.must(e.cloud.Hold(e.ctx()))
	s.joined(group, 1)
	p.settled(1, className)

	_, err = e.cloud.Admin.Patch(e.ctx(), cloudapi.KnobsPatch{Quota: new(1)})
	s.must(err)
	s.must(s.increase(group, 2))
	fakes := s.waitState(group, 2, func(i *externalgrpc.InstanceStatus) bool {
		const outOfResources = 1
		return i.GetErrorInfo().GetInstanceErrorClass() == outOfResources && i.GetErrorInfo().GetErrorCode() == "ResourceExhausted"
	})
	for range 3 { // the cluster-autoscaler repeats itself
		for _, id := range fakes {
			s.must(s.remove(group, fake(id, "create-error")))
		}
	}
	s.joined(group, 1)
	p.settled(1, className)
	if left, err := e.machineNames(e.ctx()); err != nil || !slices.Equal(left, stays) {
		t.Errorf("machines %v are left, %v; want the one that runs: %v", left, err, stays)
	}
}

// youngest is the last machine that was made, by the name for want of anything better;
// others do not count.
func (s *scaler) youngest(others []string) string {
	s.Helper()
	machines, err := s.machines(s.ctx())
	s.must(err)
	maps.DeleteFunc(machines, func(name string, _ *v1alpha1.Machine) bool { return slices.Contains(others, name) })
	return slices.MaxFunc(slices.Collect(maps.Keys(machines)), func(a, b string) int {
		return cmp.Or(machines[a].CreationTimestamp.Compare(machines[b].CreationTimestamp.Time), cmp.Compare(a, b))
	})
}

// going are the machines that are being deleted.
func (s *scaler) going(ctx context.Context) ([]string, error) {
	machines, err := s.machines(ctx)
	maps.DeleteFunc(machines, func(_ string, m *v1alpha1.Machine) bool { return m.DeletionTimestamp.IsZero() })
	return slices.Sorted(maps.Keys(machines)), err
}

// waitState waits until n instances of a group are in a state, and returns their
// ids.
func (s *scaler) waitState(group string, n int, is func(*externalgrpc.InstanceStatus) bool) []string {
	s.Helper()
	var ids []string
	s.eventually(fmt.Sprintf("%d instances of %s are as expected", n, group), func(ctx context.Context) error {
		if _, err := s.loop(ctx); err != nil {
			return err
		}
		instances, err := s.instances(ctx, group)
		ids = nil
		for id, state := range instances {
			if is(state) {
				ids = append(ids, id)
			}
		}
		if len(ids) != n {
			return errors.Join(err, fmt.Errorf("%v", instances))
		}
		return err
	})
	return ids
}

// TestAutoscaler_DriverGroups scales pools of the cloud that a driver serves, and
// goes on with others while that driver is away.
func TestAutoscaler_DriverGroups(t *testing.T) {
	e := newEnv(t)
	nats, err := e.site.StartNATS(e.ctx())
	e.must(err)
	_, tap := e.startManager(nats.URL)
	p := newPool(e, nats.URL, tap)
	cloud, err := cloudapi.NewClient(e.cloud.Endpoint, e.cloud.APIToken)
	e.must(err)
	for _, name := range []string{"a", "b"} {
		_, err := cloud.PutPool(e.ctx(), cloudapi.Pool{Name: e.name + "-" + name, Max: 5, MachineType: "small", Region: "here", Cluster: e.name})
		e.must(err)
	}
	start := func(name string) *stack.Driver {
		d, err := e.site.StartDriver(e.ctx(), tap, stack.DriverOptions{
			Name: name, NATSURL: nats.URL, Clusters: []string{e.name},
			Args: []string{"--provider=pools", "--node-groups-endpoint=" + e.cloud.Endpoint, "--node-groups-token-file=" + e.tokenFile()},
		})
		e.must(err)
		return d
	}
	replicas := []*stack.Driver{start("pools-1"), start("pools-2")}
	s := e.newScaler(nats.URL)
	group := s.mark(p, "0", "6")
	ofDriver := func(name string) string { return "provider:pools/" + e.name + "-" + name }
	s.eventuallyLook("the driver's groups are there", func(l *look) error {
		if len(l.groups) != 3 || l.groups[ofDriver("a")].GetMaxSize() != 5 {
			return fmt.Errorf("groups are %v", l.groups)
		}
		return nil
	})

	s.must(s.increase(ofDriver("a"), 3))
	s.must(s.increase(ofDriver("b"), 1))
	if l, err := s.loop(e.ctx()); err != nil || l.target[ofDriver("a")] != 3 {
		t.Fatalf("right after the increase: %v, %v", l, err)
	}
	nodes := s.joined(ofDriver("a"), 3)
	b := s.joined(ofDriver("b"), 1)
	s.wantCode("more than the maximum", s.increase(ofDriver("a"), 3), codes.OutOfRange)
	s.wantCode("another group's node", s.remove(ofDriver("a"), b[0]), codes.InvalidArgument)
	s.wantCode("fewer than have come", s.decrease(ofDriver("a"), 1), codes.FailedPrecondition)
	s.removeEach(ofDriver("a"), nodes[0], nodes[1])
	s.removeEach(ofDriver("a"), nodes[0])
	s.joinedAfter(ofDriver("a"), nodes[2])

	_, err = e.cloud.Admin.Patch(e.ctx(), cloudapi.KnobsPatch{Quota: new(2)})
	e.must(err)
	s.must(s.increase(ofDriver("a"), 1))
	fakes := s.waitState(ofDriver("a"), 1, func(i *externalgrpc.InstanceStatus) bool { return i.GetErrorInfo().GetInstanceErrorClass() == 1 })
	s.must(s.remove(ofDriver("a"), fake(fakes[0], "create-error")))
	s.must(s.remove(ofDriver("a"), fake(fakes[0], "create-error")))
	s.joinedAfter(ofDriver("a"), nodes[2])
	_, err = e.cloud.Admin.Patch(e.ctx(), cloudapi.KnobsPatch{Quota: new(0)})
	e.must(err)

	for _, d := range replicas {
		e.must(d.Kill())
	}
	s.eventually("NATS knows that no driver serves the groups", func(ctx context.Context) error {
		subscribed, err := tap.HasSubscriber(ctx, "mcm.v1."+e.name+".nodegroup.pools.resize")
		if err == nil && subscribed {
			err = errors.New("NATS still reports a subscriber")
		}
		return err
	})
	s.wantCode("a driver that is away", s.increase(ofDriver("a"), 1), codes.Unavailable)
	s.must(s.increase(group, 2)) // the others' loop goes on
	s.joined(group, 2)
	start("pools-3")
	s.eventually("the driver is back", func(context.Context) error { return s.increase(ofDriver("a"), 1) })
	s.joined(ofDriver("a"), 2)
}

// joinedAfter waits until a node is all that is left of a driver's group. The
// Nodes of instances that are gone are removed by the operator of the cloud.
func (s *scaler) joinedAfter(group string, left *externalgrpc.ExternalGrpcNode) {
	s.Helper()
	s.eventually("one instance is left of "+group, func(ctx context.Context) error {
		if _, err := s.loop(ctx); err != nil {
			return err
		}
		instances, err := s.instances(ctx, group)
		if err != nil || len(instances) != 1 || instances[left.GetProviderID()] == nil {
			return fmt.Errorf("instances %v: %w", instances, err)
		}
		return nil
	})
}

// TestAutoscaler_MockGroups plays with groups that need no cloud at all.
func TestAutoscaler_MockGroups(t *testing.T) {
	e := newEnv(t)
	nats, err := e.site.StartNATS(e.ctx())
	e.must(err)
	tap := e.tap(nats.URL)
	_, err = e.site.StartDriver(e.ctx(), tap, stack.DriverOptions{
		Name: "mock", NATSURL: nats.URL, Clusters: []string{e.name}, Args: []string{"--mock-node-groups"},
	})
	e.must(err)
	s := e.newScaler(nats.URL)
	const group = "provider:virtual/mock-a"
	s.eventuallyLook("the mock's groups are there", func(l *look) error {
		if l.groups[group] == nil || l.target["provider:virtual/mock-b"] != 1 {
			return fmt.Errorf("groups are %v, targets %v", l.groups, l.target)
		}
		return nil
	})
	s.must(s.increase(group, 2))
	ids := s.waitState(group, 2, func(i *externalgrpc.InstanceStatus) bool {
		return i.GetInstanceState() == externalgrpc.InstanceStatus_instanceRunning
	})
	s.must(s.remove(group, fake(ids[0], "unregistered")))
	left := s.waitState(group, 1, func(i *externalgrpc.InstanceStatus) bool {
		return i.GetInstanceState() == externalgrpc.InstanceStatus_instanceRunning
	})
	if !strings.HasPrefix(left[0], "virtual:///mock/") || left[0] != ids[1] {
		t.Errorf("%v is left, want %s", left, ids[1])
	}
}
