package machineset

import (
	"context"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// inventoryLimit is how long a scrape may wait for the cache.
const inventoryLimit = 5 * time.Second

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

// An inventory collects metrics of all sets at each scrape.
type inventory struct {
	ctx  context.Context
	sets client.Reader
}

// NewInventory returns the metrics of all sets that a manager's cache holds, until
// ctx ends.
func NewInventory(ctx context.Context, sets client.Reader) prometheus.Collector {
	return &inventory{ctx, sets}
}

// Describe implements prometheus.Collector.
func (i *inventory) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{setItems, setInfo, setCondition, setFailed} {
		ch <- d
	}
	for _, n := range setNumbers {
		ch <- n.desc
	}
}

// Collect implements prometheus.Collector. What cannot be read is left out, so
// that a scrape still has all other metrics.
func (i *inventory) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(i.ctx, inventoryLimit)
	defer cancel()
	list := &v1alpha1.MachineSetList{}
	if err := i.sets.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		ctrl.LoggerFrom(i.ctx).V(1).Info("no metrics of machine sets", "err", err.Error())

		return
	}
	gauge(ch, setItems, len(list.Items))
	for n := range list.Items {
		collect(ch, &list.Items[n])
	}
}

func collect(ch chan<- prometheus.Metric, set *v1alpha1.MachineSet) {
	class := set.Spec.MachineClass
	if class == (v1alpha1.ClassSpec{}) {
		class = set.Spec.Template.Spec.Class
	}
	gauge(ch, setInfo, 1, set.Name, set.Namespace, strconv.FormatInt(set.CreationTimestamp.Unix(), 10),
		class.APIGroup, class.Kind, class.Name)
	for _, n := range setNumbers {
		gauge(ch, n.desc, int(n.value(set)), set.Name, set.Namespace)
	}
	values := map[corev1.ConditionStatus]int{corev1.ConditionTrue: 1, corev1.ConditionFalse: 0}
	// Status may be somebody else's, and two equal series would spoil the scrape.
	conditions, failed := map[v1alpha1.MachineSetConditionType]bool{}, map[string]bool{}
	for _, c := range set.Status.Conditions {
		if conditions[c.Type] {
			continue
		}
		conditions[c.Type] = true
		value, known := values[c.Status]
		if !known {
			value = 2
		}
		gauge(ch, setCondition, value, set.Name, set.Namespace, string(c.Type))
	}
	for _, m := range set.Status.FailedMachines {
		if failed[m.Name] {
			continue
		}
		failed[m.Name] = true
		gauge(ch, setFailed, 1, set.Name, set.Namespace, m.Name, m.ProviderID, m.OwnerRef,
			string(m.LastOperation.State), string(m.LastOperation.Type))
	}
}

func gauge(ch chan<- prometheus.Metric, d *prometheus.Desc, value int, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(value), labels...)
}
