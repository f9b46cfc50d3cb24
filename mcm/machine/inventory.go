package machine

import (
	"context"
	"slices"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/inventory"
)

// Metrics of each machine. Names, labels and values are those of the machine
// controller manager's dashboards.
var (
	machineItems = prometheus.NewDesc("mcm_machine_items_total", "Number of machines.", nil, nil)
	machinePhase = prometheus.NewDesc("mcm_machine_current_status_phase", "The machine's phase: "+
		"-4 Terminating, -3 Failed, -2 CrashLoopBackOff, -1 Unknown, 0 Pending and all others, 1 Running.", []string{"name", "namespace"}, nil)
	machineInfo = prometheus.NewDesc("mcm_machine_info", "The machine's creation, instance, class and Node; the value is 1.", []string{
		"name", "namespace", "createdAt", "spec_provider_id", "spec_class_api_group", "spec_class_kind", "spec_class_name", "node_name",
	}, nil)
	machineCondition = prometheus.NewDesc("mcm_machine_status_condition",
		"Condition of the machine's Node: 1 for True, 0 for False, 2 for Unknown.", []string{"name", "namespace", "condition"}, nil)
)

// phaseNumbers are the values of machinePhase. Phases that are not here are 0.
var phaseNumbers = map[v1alpha1.MachinePhase]float64{
	v1alpha1.MachineTerminating:      -4,
	v1alpha1.MachineFailed:           -3,
	v1alpha1.MachineCrashLoopBackOff: -2,
	v1alpha1.MachineUnknown:          -1,
	v1alpha1.MachineRunning:          1,
}

// NewInventory returns the metrics of all machines that a manager's cache holds,
// until ctx ends. It is safe for concurrent use.
func NewInventory(ctx context.Context, machines client.Reader) prometheus.Collector {
	return inventory.New(ctx, machines, inventory.Kind[*v1alpha1.MachineList]{
		Name:    "machines",
		Metrics: []*prometheus.Desc{machineItems, machinePhase, machineInfo, machineCondition},
		List:    func() *v1alpha1.MachineList { return &v1alpha1.MachineList{} },
		Collect: func(ch chan<- prometheus.Metric, list *v1alpha1.MachineList) {
			inventory.Gauge(ch, machineItems, float64(len(list.Items)))
			for n := range list.Items {
				collect(ch, &list.Items[n])
			}
		},
	})
}

func collect(ch chan<- prometheus.Metric, m *v1alpha1.Machine) {
	class := m.Spec.Class
	inventory.Gauge(ch, machineInfo, 1, m.Name, m.Namespace, strconv.FormatInt(m.CreationTimestamp.Unix(), 10),
		m.Spec.ProviderID, class.APIGroup, class.Kind, class.Name, m.Labels[v1alpha1.LabelKeyNode])
	inventory.Gauge(ch, machinePhase, phaseNumbers[m.Status.CurrentStatus.Phase], m.Name, m.Namespace)
	for n, c := range m.Status.Conditions {
		// They are as the Node has them, and two equal series would spoil the scrape.
		double := func(before corev1.NodeCondition) bool { return before.Type == c.Type }
		if !slices.ContainsFunc(m.Status.Conditions[:n], double) {
			inventory.Gauge(ch, machineCondition, inventory.ConditionNumber(c.Status), m.Name, m.Namespace, string(c.Type))
		}
	}
}
