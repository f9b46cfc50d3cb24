package machineset

import (
	"context"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/inventory"
)

// Metrics of each set. Names and labels are those of the machine controller
// manager's dashboards.
var (
	setLabels = []string{"name", "namespace"}

	setItems = desc("items_total", "Number of machine sets.")
	setInfo  = desc("info", "The set's creation and class; the value is 1.", "name", "namespace", "createdAt",
		"spec_machine_class_api_group", "spec_machine_class_kind", "spec_machine_class_name")
	setCondition = desc("status_condition", "Condition of the set: 1 for True, 0 for False, 2 for Unknown.",
		"name", "namespace", "condition")
	setFailed = desc("failed_machines", "A machine whose last operation failed; the value is 1.", "name", "namespace",
		"failed_machine_name", "failed_machine_provider_id", "failed_machine_owner_ref", "failed_machine_last_operation_state",
		"failed_machine_last_operation_machine_operation_type")
	setNumbers = []struct {
		desc  *prometheus.Desc
		value func(*v1alpha1.MachineSet) int32
	}{
		{desc("info_spec_replicas", "Machines wished for.", setLabels...), func(s *v1alpha1.MachineSet) int32 { return s.Spec.Replicas }},
		{desc("info_spec_min_ready_seconds", "As in the spec.", setLabels...), func(s *v1alpha1.MachineSet) int32 { return s.Spec.MinReadySeconds }},
		{desc("status_replicas", "Machines there are.", setLabels...), func(s *v1alpha1.MachineSet) int32 { return s.Status.Replicas }},
		{desc("status_ready_replicas", "Machines whose Node is healthy.", setLabels...), func(s *v1alpha1.MachineSet) int32 { return s.Status.ReadyReplicas }},
		{desc("status_available_replicas", "Machines that can be worked with.", setLabels...), func(s *v1alpha1.MachineSet) int32 { return s.Status.AvailableReplicas }},
		{desc("status_fully_labelled_replicas", "Machines with all labels of the template.", setLabels...), func(s *v1alpha1.MachineSet) int32 { return s.Status.FullyLabeledReplicas }},
		{desc("status_preserved_failed_replicas", "Machines that are Failed and preserved.", setLabels...), func(s *v1alpha1.MachineSet) int32 { return s.Status.PreservedFailedReplicas }},
		{desc("status_failed_machines", "Machines whose last operation failed; failed_machines names the first 100.", setLabels...), func(s *v1alpha1.MachineSet) int32 { return s.Status.FailedMachineCount }},
	}
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("mcm_machine_set_"+name, help, labels, nil)
}

// NewInventory returns the metrics of all sets that a manager's cache holds, until
// ctx ends. It is safe for concurrent use.
func NewInventory(ctx context.Context, sets client.Reader) prometheus.Collector {
	all := []*prometheus.Desc{setItems, setInfo, setCondition, setFailed}
	for _, n := range setNumbers {
		all = append(all, n.desc)
	}

	return inventory.New(ctx, sets, inventory.Kind[*v1alpha1.MachineSetList]{
		Name: "machine sets", Metrics: all,
		List: func() *v1alpha1.MachineSetList { return &v1alpha1.MachineSetList{} },
		Collect: func(ch chan<- prometheus.Metric, list *v1alpha1.MachineSetList) {
			inventory.Gauge(ch, setItems, float64(len(list.Items)))
			for n := range list.Items {
				collect(ch, &list.Items[n])
			}
		},
	})
}

func collect(ch chan<- prometheus.Metric, set *v1alpha1.MachineSet) {
	class := set.Spec.MachineClass
	if class == (v1alpha1.ClassSpec{}) {
		class = set.Spec.Template.Spec.Class
	}
	inventory.Gauge(ch, setInfo, 1, set.Name, set.Namespace, strconv.FormatInt(set.CreationTimestamp.Unix(), 10),
		class.APIGroup, class.Kind, class.Name)
	for _, n := range setNumbers {
		inventory.Gauge(ch, n.desc, float64(n.value(set)), set.Name, set.Namespace)
	}
	// Status may be another controller's, and two equal series would spoil the scrape.
	conditions, failed := map[v1alpha1.MachineSetConditionType]bool{}, map[string]bool{}
	for _, c := range set.Status.Conditions {
		if conditions[c.Type] {
			continue
		}
		conditions[c.Type] = true
		inventory.Gauge(ch, setCondition, inventory.ConditionNumber(c.Status), set.Name, set.Namespace, string(c.Type))
	}
	for _, m := range set.Status.FailedMachines {
		if failed[m.Name] {
			continue
		}
		failed[m.Name] = true
		inventory.Gauge(ch, setFailed, 1, set.Name, set.Namespace, m.Name, m.ProviderID, m.OwnerRef,
			string(m.LastOperation.State), string(m.LastOperation.Type))
	}
}
