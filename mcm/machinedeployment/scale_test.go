package machinedeployment_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestScale_Draining has a deployment grow while the last old machine is on its way
// out: that one takes a place.
func TestScale_Draining(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	d := r.deployment(2, func(d *v1alpha1.MachineDeployment) { d.Spec.Strategy.RollingUpdate.MaxSurge = new(intstr.FromInt32(0)) })
	r.create(t, d)
	r.complete(t, d)
	for _, m := range r.machines(t) {
		r.finalize(t, &m, "test.invalid/drains")
	}
	r.change(t, d, class("large"))
	r.until(t, "an old machine that goes", d, func(*v1alpha1.MachineDeployment) bool { return r.replicas(t)["small"] == 1 })
	r.free(t)
	r.until(t, "the last step", d, func(*v1alpha1.MachineDeployment) bool {
		return maps.Equal(map[string]int32{"small": 0, "large": 1}, r.replicas(t))
	})
	r.player.watch()
	r.change(t, d, replicas(4))
	r.until(t, "what there is room for", d, func(*v1alpha1.MachineDeployment) bool {
		return maps.Equal(map[string]int32{"small": 0, "large": 3}, r.replicas(t))
	})
	r.free(t)
	r.complete(t, d)
	if most, _ := r.player.seen(); most > 4 {
		t.Errorf("there were up to %d machines for 4 replicas without surge", most)
	}
}

// free waits for a machine that is on its way out, and lets it go.
func (r *rig) free(t *testing.T) {
	t.Helper()
	if !poll(t, func() bool {
		all := r.machines(t)
		i := slices.IndexFunc(all, func(m v1alpha1.Machine) bool { return !m.DeletionTimestamp.IsZero() })
		if i >= 0 {
			r.finalize(t, &all[i])
		}

		return i >= 0
	}) {
		t.Fatal("no machine goes")
	}
}

// TestScale_Broken scales a rollout whose new machines do not work in and out again,
// while machines are on their way out: it does not go back to the old template.
func TestScale_Broken(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.player = &player{broken: map[string]bool{"large": true}}
	r.start(t)
	d := r.deployment(10)
	r.create(t, d)
	r.complete(t, d)
	r.change(t, d, class("large"))
	wantSets := func(want map[string]int32) {
		t.Helper()
		r.until(t, fmt.Sprintf("sets %v", want), d, func(d *v1alpha1.MachineDeployment) bool {
			return maps.Equal(want, r.replicas(t)) && d.Status.ObservedGeneration == d.Generation && len(r.machines(t)) == 11
		})
	}
	wantSets(map[string]int32{"small": 9, "large": 2})
	for _, m := range r.machines(t) {
		r.finalize(t, &m, "test.invalid/drains")
	}
	r.change(t, d, replicas(5))
	wantSets(map[string]int32{"small": 4, "large": 0})
	r.player.watch()
	r.change(t, d, replicas(10))
	wantSets(map[string]int32{"small": 4, "large": 0}) // 11 of 11 are there still
	r.player.breakClass("large", false)
	for _, m := range r.machines(t) {
		r.finalize(t, &m)
	}
	r.complete(t, d)
	if made := r.player.madeOf("small"); made > 0 {
		t.Errorf("%d machines of the old template were made", made)
	}
	if most, _ := r.player.seen(); most > 11 {
		t.Errorf("there were up to %d machines, want 11", most)
	}
}

// TestScale_NewTemplate changes replicas and template in one write.
func TestScale_NewTemplate(t *testing.T) {
	t.Parallel()
	for name, strategy := range map[string]v1alpha1.MachineDeploymentStrategyType{
		"RollingUpdate": v1alpha1.RollingUpdateMachineDeploymentStrategyType, "Recreate": v1alpha1.RecreateMachineDeploymentStrategyType,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRunningRig(t)
			d := r.deployment(2, func(d *v1alpha1.MachineDeployment) { d.Spec.Strategy.Type = strategy })
			r.create(t, d)
			r.complete(t, d)
			r.player.watch()
			r.change(t, d, func(d *v1alpha1.MachineDeployment) {
				replicas(5)(d)
				class("large")(d)
			})
			r.complete(t, d)
			if old, made := r.player.madeOf("small"), r.player.madeOf("large"); old > 0 || made != 5 {
				t.Errorf("%d old and %d new machines were made, want none and 5", old, made)
			}
		})
	}
}
