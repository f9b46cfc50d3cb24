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
	// The old set looks like the only one, and nobody else has written it: no lock tells.
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
