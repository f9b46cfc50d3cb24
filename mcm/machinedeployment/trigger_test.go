package machinedeployment_test

import (
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

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
