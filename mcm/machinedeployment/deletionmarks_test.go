package machinedeployment_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestTrigger has the cluster-autoscaler shrink a deployment by two machines of
// its choice, in one update.
func TestTrigger(t *testing.T) {
	t.Parallel()
	const at = "2026-08-11T07:00:00Z"
	r := newRunningRig(t)
	d := r.deployment(4)
	r.create(t, d)
	r.complete(t, d)
	all := r.machines(t)
	gone := []string{all[1].Name, all[3].Name}
	r.change(t, d, func(d *v1alpha1.MachineDeployment) {
		d.Spec.Replicas = 2
		d.Annotations["node.machine.sapcloud.io/trigger-deletion-by-mcm"] = strings.Join([]string{
			gone[0] + "~" + at, gone[1] + "~" + at, "nosuch~" + at, all[0].Name + "~yesterday",
		}, ",")
		d.Annotations["machine.sapcloud.io/last-deployment-replica-change-by-scaler-time"] = at
	})
	r.complete(t, d)
	left := map[string]bool{}
	for _, m := range r.machines(t) {
		left[m.Name] = true
	}
	if diff := cmp.Diff(map[string]bool{all[0].Name: true, all[2].Name: true}, left); diff != "" {
		t.Errorf("machines left: -want, +got:\n%s", diff)
	}
	if set := r.sets(t)["small"]; set.Annotations["machine.sapcloud.io/last-deployment-replica-change-by-scaler-time"] != at {
		t.Errorf("the set does not know when the replicas were changed: %v", set.Annotations)
	}
	r.until(t, "a removed annotation", d, func(d *v1alpha1.MachineDeployment) bool {
		_, ok := d.Annotations["node.machine.sapcloud.io/trigger-deletion-by-mcm"]

		return !ok
	})
}

// TestTrigger_Marks says what a machine looks like that is to go.
func TestTrigger_Marks(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	d := r.deployment(2)
	r.create(t, d)
	r.complete(t, d)
	names := r.machines(t)
	r.change(t, d, func(d *v1alpha1.MachineDeployment) {
		// An older autoscaler gives no time.
		d.Annotations["node.machine.sapcloud.io/trigger-deletion-by-mcm"] = names[0].Name + "~2026-08-11T07:00:00Z," + names[1].Name
	})
	var second string
	r.until(t, "a time for each entry", d, func(d *v1alpha1.MachineDeployment) bool {
		first, rest, _ := strings.Cut(d.Annotations["node.machine.sapcloud.io/trigger-deletion-by-mcm"], ",")
		name, at, ok := strings.Cut(rest, "~")
		second = at

		return first == names[0].Name+"~2026-08-11T07:00:00Z" && name == names[1].Name && ok
	})
	got := map[string]map[string]string{}
	for _, m := range r.machines(t) {
		got[m.Name] = m.Annotations
	}
	want := map[string]map[string]string{}
	for name, at := range map[string]string{names[0].Name: "2026-08-11T07:00:00Z", names[1].Name: second} {
		want[name] = map[string]string{
			"machinepriority.machine.sapcloud.io": "1", "machine.sapcloud.io/marked-for-deletion-time": at,
		}
	}
	if !maps.EqualFunc(want, got, maps.Equal[map[string]string]) {
		t.Errorf("annotations of machines (-want +got):\n%s", cmp.Diff(want, got))
	}
}

// TestTrigger_Failed has a chosen machine fail before the controller looks: it stays
// the one to go, or its set would delete another one while it is preserved.
func TestTrigger_Failed(t *testing.T) {
	t.Parallel()
	const at, trigger = "2026-08-11T07:00:00Z", "node.machine.sapcloud.io/trigger-deletion-by-mcm"
	r := newRunningRig(t)
	d := r.deployment(2)
	r.create(t, d)
	r.complete(t, d)
	r.player.sleep()
	all := r.machines(t)
	chosen, other := &all[0], &all[1]
	chosen.Status.CurrentStatus.Phase = v1alpha1.MachineFailed
	if err := r.Status().Update(t.Context(), chosen); err != nil {
		t.Fatal(err)
	}
	r.change(t, d, func(d *v1alpha1.MachineDeployment) {
		d.Spec.Replicas = 1
		d.Annotations[trigger] = chosen.Name + "~" + at
		d.Annotations["machine.sapcloud.io/last-deployment-replica-change-by-scaler-time"] = at
	})
	marked := func(name string) bool {
		for _, m := range r.machines(t) {
			if m.Name == name {
				return m.Annotations["machine.sapcloud.io/marked-for-deletion-time"] == at
			}
		}

		return false
	}
	r.until(t, "the mark, and the replicas", d, func(*v1alpha1.MachineDeployment) bool {
		return marked(chosen.Name) && r.replicas(t)["small"] == 1
	})
	// Passes later, which know that it is Failed, too.
	r.change(t, d, func(d *v1alpha1.MachineDeployment) { d.Annotations[trigger] += "," + other.Name + "~" + at })
	r.until(t, "the other's mark", d, func(*v1alpha1.MachineDeployment) bool { return marked(other.Name) })
	r.until(t, "both entries", d, func(d *v1alpha1.MachineDeployment) bool {
		return d.Annotations[trigger] == chosen.Name+"~"+at+","+other.Name+"~"+at
	})
}

// rolling brings a deployment of four, one more and one less, to the middle of a
// rollout: two old machines run and one is on its way out, of two new ones one runs.
// What it returns lets the old one go.
func (r *rig) rolling(t *testing.T) (d *v1alpha1.MachineDeployment, end func()) {
	t.Helper()
	r.player = &player{broken: map[string]bool{}, held: map[string]int{"large": 0}}
	r.start(t)
	d = r.deployment(4)
	r.create(t, d)
	r.complete(t, d)
	r.change(t, d, class("large"))
	wait := func(what string, want map[string]int32) {
		t.Helper()
		r.until(t, what, d, func(d *v1alpha1.MachineDeployment) bool {
			return maps.Equal(want, r.replicas(t)) && d.Status.Replicas == 5 && d.Status.ObservedGeneration == d.Generation
		})
	}
	wait("the first step", map[string]int32{"small": 3, "large": 2})
	var leaving []string
	for _, m := range r.machines(t) {
		if m.Spec.Class.Name == "small" {
			r.finalize(t, &m, "test.invalid/drains")
			leaving = append(leaving, m.Name)
		}
	}
	r.player.release("large", 1)
	r.nudge(t)
	r.until(t, "an old machine that goes", d, func(*v1alpha1.MachineDeployment) bool {
		return maps.Equal(map[string]int32{"small": 2, "large": 2}, r.replicas(t)) && slices.ContainsFunc(r.machines(t), func(m v1alpha1.Machine) bool { return !m.DeletionTimestamp.IsZero() })
	})

	return d, func() {
		for _, m := range r.machines(t) {
			if slices.Contains(leaving, m.Name) {
				r.finalize(t, &m)
			}
		}
	}
}

// TestTrigger_Rollout has the autoscaler choose an old machine in the middle of a
// rollout: it is made up for by a new one, if at all. The replicas go down, or the
// autoscaler has thought better of that.
func TestTrigger_Rollout(t *testing.T) {
	t.Parallel()
	const at = "2026-08-11T07:00:00Z"
	for name, desired := range map[string]int32{"Shrink": 3, "Stay": 4} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			d, end := r.rolling(t)
			all := r.machines(t)
			i := slices.IndexFunc(all, func(m v1alpha1.Machine) bool { return m.Spec.Class.Name == "small" && m.DeletionTimestamp.IsZero() })
			r.player.watch()
			r.change(t, d, func(d *v1alpha1.MachineDeployment) {
				d.Spec.Replicas = desired
				d.Annotations["node.machine.sapcloud.io/trigger-deletion-by-mcm"] = all[i].Name + "~" + at
				d.Annotations["machine.sapcloud.io/last-deployment-replica-change-by-scaler-time"] = at
			})
			if !poll(t, func() bool {
				return slices.ContainsFunc(r.machines(t), func(m v1alpha1.Machine) bool { return m.Name == all[i].Name && !m.DeletionTimestamp.IsZero() })
			}) {
				t.Fatal("the chosen machine stays")
			}
			end()
			r.player.release("large", 9)
			r.nudge(t)
			r.complete(t, d)
			if made := r.player.madeOf("small"); made > 0 {
				t.Errorf("%d machines of the old template were made", made)
			}
			if most, _ := r.player.seen(); most > 5 {
				t.Errorf("there were up to %d machines, 5 before", most)
			}
		})
	}
}

// TestTrigger_LastOld has the autoscaler choose a machine of the latest set, the only
// one that has replicas, while the last old machine is on its way out: there is no
// room for another one. The replicas go down, or the autoscaler has thought better of
// that.
func TestTrigger_LastOld(t *testing.T) {
	t.Parallel()
	const at = "2026-08-11T07:00:00Z"
	for name, desired := range map[string]int32{"Shrink": 2, "Stay": 3} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRunningRig(t)
			d := r.deployment(3, func(d *v1alpha1.MachineDeployment) { d.Spec.Strategy.RollingUpdate.MaxSurge = new(intstr.FromInt32(0)) })
			r.create(t, d)
			r.complete(t, d)
			for _, m := range r.machines(t) {
				r.finalize(t, &m, "test.invalid/drains")
			}
			r.change(t, d, class("large"))
			for range 2 {
				r.free(t)
			}
			r.until(t, "the last step", d, func(d *v1alpha1.MachineDeployment) bool {
				return maps.Equal(map[string]int32{"small": 0, "large": 2}, r.replicas(t)) && d.Status.AvailableReplicas == 2
			})
			all := r.machines(t)
			i := slices.IndexFunc(all, func(m v1alpha1.Machine) bool { return m.Spec.Class.Name == "large" })
			r.finalize(t, &all[i], "test.invalid/drains")
			r.player.watch()
			r.change(t, d, func(d *v1alpha1.MachineDeployment) {
				d.Spec.Replicas = desired
				metav1.SetMetaDataAnnotation(&d.ObjectMeta, "node.machine.sapcloud.io/trigger-deletion-by-mcm", all[i].Name+"~"+at)
				metav1.SetMetaDataAnnotation(&d.ObjectMeta, "machine.sapcloud.io/last-deployment-replica-change-by-scaler-time", at)
			})
			if !poll(t, func() bool {
				large, gone, live := r.sets(t)["large"], false, int32(0)
				for _, m := range r.machines(t) {
					gone = gone || m.Name == all[i].Name && !m.DeletionTimestamp.IsZero()
					if m.Spec.Class.Name == "large" && m.DeletionTimestamp.IsZero() {
						live++
					}
				}

				return gone && live == large.Spec.Replicas
			}) {
				t.Fatal("the chosen machine stays, or is not made up for by its set")
			}
			for range 2 {
				r.free(t)
			}
			r.complete(t, d)
			if most, _ := r.player.seen(); most > 3 {
				t.Errorf("there were up to %d machines, 3 before and no surge", most)
			}
		})
	}
}

// TestTrigger_Paused shrinks a deployment that is paused in the middle of a rollout:
// that makes no machine, though the rollout had room for one.
func TestTrigger_Paused(t *testing.T) {
	t.Parallel()
	const at = "2026-08-11T07:00:00Z"
	r := newRig(t)
	r.player = &player{broken: map[string]bool{}, held: map[string]int{"large": 0}}
	r.start(t)
	d := r.deployment(4)
	r.create(t, d)
	r.complete(t, d)
	r.change(t, d, class("large"))
	wantSets := func(want map[string]int32) {
		t.Helper()
		r.until(t, fmt.Sprintf("sets %v", want), d, func(d *v1alpha1.MachineDeployment) bool {
			return maps.Equal(want, r.replicas(t)) && d.Status.ObservedGeneration == d.Generation
		})
	}
	wantSets(map[string]int32{"small": 3, "large": 2})
	// One new machine fewer than the limits allow.
	r.change(t, d, func(d *v1alpha1.MachineDeployment) {
		d.Spec.Paused = true
		d.Spec.Strategy.RollingUpdate.MaxSurge = new(intstr.FromInt32(2))
	})
	r.until(t, "the pause", d, func(d *v1alpha1.MachineDeployment) bool {
		return d.Status.ObservedGeneration == d.Generation && len(r.machines(t)) == 5
	})
	all := r.machines(t)
	i := slices.IndexFunc(all, func(m v1alpha1.Machine) bool { return m.Spec.Class.Name == "small" })
	r.player.watch()
	r.change(t, d, func(d *v1alpha1.MachineDeployment) {
		d.Spec.Replicas = 3
		metav1.SetMetaDataAnnotation(&d.ObjectMeta, "node.machine.sapcloud.io/trigger-deletion-by-mcm", all[i].Name+"~"+at)
		metav1.SetMetaDataAnnotation(&d.ObjectMeta, "machine.sapcloud.io/last-deployment-replica-change-by-scaler-time", at)
	})
	wantSets(map[string]int32{"small": 2, "large": 2})
	if !poll(t, func() bool {
		return !slices.ContainsFunc(r.machines(t), func(m v1alpha1.Machine) bool { return m.Name == all[i].Name })
	}) {
		t.Fatal("the chosen machine stays")
	}
	if most, _ := r.player.seen(); r.player.madeOf("small")+r.player.madeOf("large") > 0 || most > 5 {
		t.Errorf("there were up to %d machines, 5 before, and some were made", most)
	}
}

// TestTrigger_NoTime has an older autoscaler shrink a deployment: what it says of the
// time of the replicas also deletes the machines, unless that was recorded before.
func TestTrigger_NoTime(t *testing.T) {
	t.Parallel()
	const at = "2026-08-11T07:00:00Z"
	for name, tc := range map[string]struct {
		reason string
		heard  bool
	}{
		"new":      {"both came in one write", false},
		"recorded": {"a set that has seen that would delete the machine at once, whatever its replicas", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRunningRig(t)
			d := r.deployment(3)
			if tc.heard {
				d.Annotations = map[string]string{"machine.sapcloud.io/last-deployment-replica-change-by-scaler-time": at}
			}
			r.create(t, d)
			r.complete(t, d)
			chosen := r.machines(t)[1].Name
			r.player.sleep()
			r.change(t, d, func(d *v1alpha1.MachineDeployment) {
				d.Spec.Replicas = 2
				metav1.SetMetaDataAnnotation(&d.ObjectMeta, "node.machine.sapcloud.io/trigger-deletion-by-mcm", chosen)
				metav1.SetMetaDataAnnotation(&d.ObjectMeta, "machine.sapcloud.io/last-deployment-replica-change-by-scaler-time", at)
			})
			got := ""
			r.until(t, "a time", d, func(d *v1alpha1.MachineDeployment) bool {
				_, got, _ = strings.Cut(d.Annotations["node.machine.sapcloud.io/trigger-deletion-by-mcm"], "~")

				return got != ""
			})
			if same := got == at; same == tc.heard {
				t.Errorf("the machine is chosen at %s, the replicas were changed at %s: %s", got, at, tc.reason)
			}
		})
	}
}
