package machine_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// What the class says of virtual resources reaches live Nodes, each time that it
// changes, and what kubelets report stays.
func TestVirtualCapacity(t *testing.T) {
	t.Parallel()
	const licenses, seats = "example.org/licenses", "example.org/seats"
	r := newRunningRig(t)
	m, class := r.machine("a"), r.class()
	set := func(virtual corev1.ResourceList) {
		r.change(t, class, func() {
			class.NodeTemplate = &v1alpha1.NodeTemplate{
				InstanceType: "s", Region: "r", Zone: "z", VirtualCapacity: virtual,
				Capacity: corev1.ResourceList{"cpu": resource.MustParse("2"), "gpu": resource.MustParse("0"), "memory": resource.MustParse("4Gi")},
			}
		})
	}
	shows := func(reason string, want map[string]string) {
		t.Helper()
		want["cpu"] = "2"
		var diff string
		if !poll(t, func() bool {
			got := map[string]string{}
			for name, q := range r.node(t, m.Name).Status.Capacity {
				got[string(name)] = q.String()
			}
			diff = cmp.Diff(want, got)

			return diff == ""
		}) {
			t.Fatalf("%s: capacity (-want +got):\n%s", reason, diff)
		}
	}
	set(corev1.ResourceList{licenses: resource.MustParse("4")})
	r.create(t, m)
	r.join(t, m, ready(corev1.ConditionFalse))
	r.setCapacity(t, m.Name, "cpu", "2")
	shows("a Node that joined", map[string]string{licenses: "4"})

	set(corev1.ResourceList{licenses: resource.MustParse("5"), seats: resource.MustParse("1")})
	shows("an edited class", map[string]string{licenses: "5", seats: "1"})

	set(nil)
	shows("a class that has none any more", map[string]string{})

	set(corev1.ResourceList{licenses: resource.MustParse("-1")})
	r.event(t, m, "InvalidField", "nodeTemplate.virtualCapacity is left out")
	r.condition(t, r.node(t, m.Name), ready(corev1.ConditionTrue))
	r.phase(t, m, v1alpha1.MachineRunning) // all the same
}

// setCapacity writes what a kubelet would.
func (r *rig) setCapacity(t *testing.T, node string, name corev1.ResourceName, value string) {
	t.Helper()
	if !poll(t, func() bool {
		n := r.node(t, node)
		if n.Status.Capacity == nil {
			n.Status.Capacity = corev1.ResourceList{}
		}
		n.Status.Capacity[name] = resource.MustParse(value)

		return r.Status().Update(t.Context(), n) == nil
	}) {
		t.Fatalf("capacity of node %s cannot be written", node)
	}
}
