package machineset

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// staleMachines has the name that dashboards made for the machine controller
// manager look for.
var staleMachines = prometheus.NewCounter(prometheus.CounterOpts{
	Name: "mcm_machine_stale_machines_total",
	Help: "Machines that were replaced because they had been unhealthy for too long.",
})

// Collectors are the controller's metrics. They count for all Reconcilers of the
// process.
func Collectors() []prometheus.Collector { return []prometheus.Collector{staleMachines} }

// unhealthy reports whether a machine Failed because its Node was unhealthy.
func unhealthy(m *v1alpha1.Machine) bool {
	return m.Status.CurrentStatus.Phase == v1alpha1.MachineFailed &&
		m.Status.LastOperation.Type == v1alpha1.MachineOperationHealthCheck
}
