package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// newSet returns a set of the env's usual class.
func (e *env) newSet(replicas int32) *v1alpha1.MachineSet {
	labels := map[string]string{"pool": e.name}
	return &v1alpha1.MachineSet{
		ObjectMeta: metav1.ObjectMeta{Name: e.name, Namespace: e.name},
		Spec: v1alpha1.MachineSetSpec{
			Replicas: replicas, Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: v1alpha1.MachineTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec:       v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: v1alpha1.KindMachineClass, Name: className}},
			},
		},
	}
}

// scaleSet sets a set's replicas.
func (e *env) scaleSet(set *v1alpha1.MachineSet, replicas int32) {
	e.Helper()
	patch := client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas))
	e.must(e.kube.Patch(e.ctx(), set, patch))
}

// setHas returns an error until a set has n machines, all of them ready, and no
// others are left of it.
func (e *env) setHas(ctx context.Context, set *v1alpha1.MachineSet, n int32) error {
	got := &v1alpha1.MachineSet{}
	if err := e.kube.Get(ctx, client.ObjectKeyFromObject(set), got); err != nil {
		return err
	}
	status := got.Status
	if status.ObservedGeneration != got.Generation || status.Replicas != n || status.ReadyReplicas != n || status.AvailableReplicas != n {
		return fmt.Errorf("generation %d has status %+v", got.Generation, status)
	}
	return nil
}

func (e *env) waitSet(set *v1alpha1.MachineSet, n int32) {
	e.Helper()
	e.eventually(fmt.Sprintf("the set has %d ready machines", n), func(ctx context.Context) error { return e.setHas(ctx, set, n) })
}

// machineNames lists the env's machines.
func (e *env) machineNames(ctx context.Context) ([]string, error) {
	var list v1alpha1.MachineList
	err := e.kube.List(ctx, &list, client.InNamespace(e.name))
	var names []string
	for i := range list.Items {
		names = append(names, list.Items[i].Name)
	}
	slices.Sort(names)
	return names, err
}

// wantMachinesOnly expects an instance for each Machine, and no other.
func (e *env) wantMachinesOnly() {
	e.Helper()
	e.eventually("there is an instance for each Machine", func(ctx context.Context) error {
		machines, err := e.machineNames(ctx)
		if err != nil {
			return err
		}
		instances, err := e.cloud.Instances(ctx)
		var names []string
		for _, instance := range instances {
			names = append(names, instance.Name)
		}
		slices.Sort(names)
		if !slices.Equal(machines, names) {
			return errors.Join(err, fmt.Errorf("Machines are %q, instances %q", machines, names))
		}
		return err
	})
}

// setGone returns an error until a set and all machines of the env are gone.
func (e *env) setGone(ctx context.Context, set *v1alpha1.MachineSet) error {
	left, err := e.machineNames(ctx)
	if err != nil || len(left) > 0 {
		return errors.Join(err, fmt.Errorf("machines left: %q", left))
	}
	err = e.kube.Get(ctx, client.ObjectKeyFromObject(set), &v1alpha1.MachineSet{})
	if err == nil {
		return errors.New("the set is there")
	}
	return client.IgnoreNotFound(err)
}

// TestMachineSet scales a set up and down, with a driver replica killed while it
// grows and the leading manager while it shrinks.
func TestMachineSet(t *testing.T) {
	e := newEnv(t)
	m, tap := e.startManagers()
	drivers := e.startDrivers(2, m.nats, tap)
	e.createClass()
	set := e.newSet(0)
	e.must(e.kube.Create(e.ctx(), set))
	e.scaleSet(set, 1)
	e.waitSet(set, 1) // so the first manager leads before there is another
	m.standBy()
	e.slowCreates(2 * time.Second)
	e.scaleSet(set, 6)
	victim, _ := e.waitCreating(tap, drivers)
	e.must(victim.Kill())
	e.waitSet(set, 6)
	e.wantMachinesOnly()
	e.wantInstances(6)

	e.scaleSet(set, 2)
	e.must(m.leader.Kill())
	e.waitSet(set, 2)
	e.wantMachinesOnly()
	e.wantInstances(6)

	e.must(e.kube.Delete(e.ctx(), set))
	e.eventually("the set and its machines are gone", func(ctx context.Context) error { return e.setGone(ctx, set) })
	e.wantMachinesOnly()
}

// TestAboveAnotherMachineController runs everything but the machine controller,
// whose part the test plays: one that keeps to Machine.status and knows nothing of
// ours.
func TestAboveAnotherMachineController(t *testing.T) {
	e := newEnv(t)
	e.startManager("", "--controllers=*,-machine")
	other := &otherController{env: e}
	set := e.newSet(0)
	e.must(e.kube.Create(e.ctx(), set))
	for _, n := range []int32{3, 1, 5} {
		e.scaleSet(set, n)
		other.runUntil("the set has as many machines as it is to have", func(ctx context.Context) error {
			return e.setHas(ctx, set, n)
		})
	}
	names, err := e.machineNames(e.ctx())
	e.must(err)
	other.fail = names[0]
	other.runUntil("the Failed machine is replaced", func(ctx context.Context) error {
		there, err := e.machineNames(ctx)
		if err == nil && slices.Contains(there, names[0]) {
			err = fmt.Errorf("%s is there", names[0])
		}
		return errors.Join(err, e.setHas(ctx, set, 5))
	})
	e.must(e.kube.Delete(e.ctx(), set))
	other.runUntil("the set and its machines are gone", func(ctx context.Context) error { return e.setGone(ctx, set) })
	var events corev1.EventList
	e.must(e.kube.List(e.ctx(), &events, client.InNamespace(e.name)))
	for i := range events.Items {
		if event := &events.Items[i]; event.InvolvedObject.Kind == v1alpha1.KindMachine {
			t.Errorf("mcm wrote an Event about machine %s, which it does not control: %s", event.InvolvedObject.Name, event.Message)
		}
	}
}
