package machinedeployment_test

import (
	"fmt"
	"maps"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// lookInVain waits for n passes that find their cache behind and ask the API server.
func (r *rig) lookInVain(t *testing.T, d *v1alpha1.MachineDeployment, n int) {
	t.Helper()
	for range n {
		asked := r.proxy.Requests("GET machinesets")
		r.change(t, d, func(d *v1alpha1.MachineDeployment) {
			metav1.SetMetaDataAnnotation(&d.ObjectMeta, "test.invalid/look", fmt.Sprint(asked))
		})
		if !poll(t, func() bool { return r.proxy.Requests("GET machinesets") > asked }) {
			t.Fatal("the controller does not look at its sets")
		}
	}
}

// TestStaleCache has the controller work with a cache that shows none of its own
// writes: it may make no second set, nor a plan from sets as they were.
func TestStaleCache(t *testing.T) {
	t.Parallel()
	r := newSlowRig(t)
	d := r.deployment(4)
	r.proxy.Hold("machinesets")
	r.create(t, d)
	r.until(t, "a set", d, func(*v1alpha1.MachineDeployment) bool { return len(r.sets(t)) == 1 })
	r.lookInVain(t, d, 5)
	if sets := r.sets(t); len(sets) != 1 {
		t.Errorf("there are %d sets", len(sets))
	}
	r.proxy.Release("machinesets")
	r.complete(t, d)

	r.proxy.Hold("machinesets")
	r.change(t, d, class("large"))
	r.until(t, "the new set", d, func(*v1alpha1.MachineDeployment) bool { return r.sets(t)["large"] != nil })
	r.lookInVain(t, d, 5)
	if got := r.replicas(t); !maps.Equal(got, map[string]int32{"small": 4, "large": 1}) {
		t.Errorf("sets were changed by what they were: %v", got)
	}
	// The old set looks like the only one, and has no other writer: the optimistic lock does not help.
	r.change(t, d, func(d *v1alpha1.MachineDeployment) { d.Spec.Paused, d.Spec.Replicas = true, 8 })
	r.lookInVain(t, d, 5)
	if got := r.replicas(t); got["small"] != 4 {
		t.Errorf("the old set was scaled as if there were no new one: %v", got)
	}
	r.proxy.Release("machinesets")
	r.until(t, "more of the new set", d, func(*v1alpha1.MachineDeployment) bool {
		return maps.Equal(r.replicas(t), map[string]int32{"small": 4, "large": 5})
	})
	r.change(t, d, func(d *v1alpha1.MachineDeployment) { d.Spec.Paused = false })
	r.complete(t, d)
}

// TestStaleMachines rolls out with a cache that shows the machines there were
// before: whatever becomes of them, the limits hold.
func TestStaleMachines(t *testing.T) {
	t.Parallel()
	r := newSlowRig(t)
	d := r.deployment(4)
	r.create(t, d)
	r.complete(t, d)
	r.player.watch()
	r.proxy.Hold("machines")
	r.change(t, d, class("large"))
	// The old one that is gone seems to be there still, and takes its place.
	far := map[string]int32{"small": 3, "large": 1}
	r.until(t, "the first step", d, func(*v1alpha1.MachineDeployment) bool { return maps.Equal(r.replicas(t), far) })
	for range 5 {
		looks := r.get(t, d).ResourceVersion
		r.change(t, d, func(d *v1alpha1.MachineDeployment) { d.Spec.MinReadySeconds++ })
		r.until(t, "a look", d, func(d *v1alpha1.MachineDeployment) bool {
			return d.ResourceVersion != looks && d.Status.ObservedGeneration == d.Generation
		})
	}
	if got := r.replicas(t); !maps.Equal(got, far) {
		t.Errorf("replicas %v from machines that are gone, want %v", got, far)
	}
	r.proxy.Release("machines")
	r.complete(t, d)
	if most, least := r.player.seen(); most > 5 || least < 3 {
		t.Errorf("there were up to %d machines and down to %d running, want 5 and 3", most, least)
	}
}

// TestStaleMachines_Trigger has the cluster-autoscaler choose a machine that the
// controller's cache does not show yet.
func TestStaleMachines_Trigger(t *testing.T) {
	t.Parallel()
	const at = "2026-08-11T07:00:00Z"
	r := newSlowRig(t)
	d := r.deployment(1)
	r.create(t, d)
	r.complete(t, d)
	first := r.machines(t)[0].Name
	r.proxy.Hold("machines")
	r.change(t, d, replicas(2))
	r.until(t, "a second machine", d, func(d *v1alpha1.MachineDeployment) bool { return d.Status.AvailableReplicas == 2 })
	all := r.machines(t)
	second := all[0].Name
	if second == first {
		second = all[1].Name
	}
	r.player.sleep()
	r.change(t, d, func(d *v1alpha1.MachineDeployment) {
		d.Spec.Replicas = 1
		d.Annotations["node.machine.sapcloud.io/trigger-deletion-by-mcm"] = second + "~" + at
		d.Annotations["machine.sapcloud.io/last-deployment-replica-change-by-scaler-time"] = at
	})
	r.until(t, "a look", d, func(d *v1alpha1.MachineDeployment) bool {
		return r.sets(t)["small"].Spec.Replicas == 1 && d.Status.ObservedGeneration == d.Generation
	})
	for _, m := range r.machines(t) {
		if marked := m.Annotations["machinepriority.machine.sapcloud.io"] == "1"; marked != (m.Name == second) {
			t.Errorf("machine %s, chosen %s: annotations %v", m.Name, second, m.Annotations)
		}
	}
}
