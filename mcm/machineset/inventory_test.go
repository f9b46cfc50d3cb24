package machineset

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// A shelf is a cache with one set.
type shelf struct {
	client.Reader

	set *v1alpha1.MachineSet
}

func (s shelf) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	list.(*v1alpha1.MachineSetList).Items = []v1alpha1.MachineSet{*s.set}

	return nil
}

func TestInventory(t *testing.T) {
	t.Parallel()
	set := setOf(3)
	set.Name, set.Namespace, set.CreationTimestamp = "a", "shop", metav1.NewTime(time.Unix(1700000000, 0))
	set.Spec.Template.Spec.Class = v1alpha1.ClassSpec{Kind: v1alpha1.KindMachineClass, Name: "small"}
	set.Status = v1alpha1.MachineSetStatus{
		Replicas: 4, ReadyReplicas: 2, AvailableReplicas: 1, FullyLabeledReplicas: 3, PreservedFailedReplicas: 5, FailedMachineCount: 6,
		Conditions:     []v1alpha1.MachineSetCondition{{Type: "Frozen", Status: "True"}, {Type: "ReplicaFailure", Status: "Unknown"}},
		FailedMachines: []v1alpha1.MachineSummary{{Name: "a-1", ProviderID: "p:1", OwnerRef: "a", LastOperation: v1alpha1.LastOperation{State: "Failed", Type: "Create"}}},
	}
	// As another controller may leave it.
	set.Status.Conditions = append(set.Status.Conditions, set.Status.Conditions[0])
	set.Status.FailedMachines = append(set.Status.FailedMachines, set.Status.FailedMachines[0])
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(NewInventory(t.Context(), shelf{set: set}))
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			fmt.Fprintf(&got, "%s{%s} %v\n", f.GetName(), strings.Join(labels, ","), m.GetGauge().GetValue())
		}
	}
	const want = `mcm_machine_set_failed_machines{failed_machine_last_operation_machine_operation_type="Create",failed_machine_last_operation_state="Failed",failed_machine_name="a-1",failed_machine_owner_ref="a",failed_machine_provider_id="p:1",name="a",namespace="shop"} 1
mcm_machine_set_info{createdAt="1700000000",name="a",namespace="shop",spec_machine_class_api_group="",spec_machine_class_kind="MachineClass",spec_machine_class_name="small"} 1
mcm_machine_set_info_spec_min_ready_seconds{name="a",namespace="shop"} 0
mcm_machine_set_info_spec_replicas{name="a",namespace="shop"} 3
mcm_machine_set_items_total{} 1
mcm_machine_set_status_available_replicas{name="a",namespace="shop"} 1
mcm_machine_set_status_condition{condition="Frozen",name="a",namespace="shop"} 1
mcm_machine_set_status_condition{condition="ReplicaFailure",name="a",namespace="shop"} 2
mcm_machine_set_status_failed_machines{name="a",namespace="shop"} 6
mcm_machine_set_status_fully_labelled_replicas{name="a",namespace="shop"} 3
mcm_machine_set_status_preserved_failed_replicas{name="a",namespace="shop"} 5
mcm_machine_set_status_ready_replicas{name="a",namespace="shop"} 2
mcm_machine_set_status_replicas{name="a",namespace="shop"} 4
`
	if diff := cmp.Diff(want, got.String()); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}
