package machinedeployment

import (
	"context"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/inventory"
)

// Names and labels are those that dashboards made for the machine controller
// manager look for.
const subsystem = "mcm_machine_deployment"

var (
	itemsDesc = prometheus.NewDesc(subsystem+"_items_total", "Machine deployments there are.", nil, nil)
	infoDesc  = prometheus.NewDesc(subsystem+"_info", "The creation of a machine deployment, in seconds since 1970, and its strategy; the value is 1.",
		[]string{"name", "namespace", "createdAt", "spec_strategy_type"}, nil)
	conditionDesc = prometheus.NewDesc(subsystem+"_status_condition",
		"Condition of a machine deployment: 1 for True, 0 for False, 2 for Unknown.", []string{"name", "namespace", "condition"}, nil)
	failedDesc = prometheus.NewDesc(subsystem+"_failed_machines",
		"Machines of a machine deployment whose last operation failed.", []string{
			"name", "namespace", "failed_machine_name", "failed_machine_provider_id", "failed_machine_owner_ref",
			"failed_machine_last_operation_state", "failed_machine_last_operation_machine_operation_type",
		}, nil)
)

// gauges are the numbers that each deployment has.
var gauges = []numbered{
	gauge("info_spec_paused", "Whether rollouts are held back.", func(d *v1alpha1.MachineDeployment) float64 {
		if d.Spec.Paused {
			return 1
		}

		return 0
	}),
	gauge("info_spec_replicas", "Machines wished for.", func(d *v1alpha1.MachineDeployment) float64 { return float64(d.Spec.Replicas) }),
	gauge("info_spec_min_ready_seconds", "The spec's minReadySeconds.",
		func(d *v1alpha1.MachineDeployment) float64 { return float64(d.Spec.MinReadySeconds) }),
	gauge("info_spec_rolling_update_max_surge", "Machines there may be beyond the replicas.",
		func(d *v1alpha1.MachineDeployment) float64 { return float64(limitsOf(&d.Spec).surge) }),
	gauge("info_spec_rolling_update_max_unavailable", "Machines that may be unavailable.",
		func(d *v1alpha1.MachineDeployment) float64 { return float64(limitsOf(&d.Spec).unavailable) }),
	optional("info_spec_revision_history_limit", "Old machine sets that are kept.", func(d *v1alpha1.MachineDeployment) *int32 {
		return d.Spec.RevisionHistoryLimit
	}),
	optional("info_spec_progress_deadline_seconds", "Time that a rollout may stand still.", func(d *v1alpha1.MachineDeployment) *int32 {
		return d.Spec.ProgressDeadlineSeconds
	}),
	{
		prometheus.NewDesc(subsystem+"_info_spec_rollback_to_revision", "Revision to go back to; 0 for the one before.", []string{"name", "namespace"}, nil),
		func(d *v1alpha1.MachineDeployment) (float64, bool) {
			to := d.Spec.RollbackTo
			if to == nil {
				return 0, false
			}

			return float64(to.Revision), true
		},
	},
	gauge("status_replicas", "Machines there are.", func(d *v1alpha1.MachineDeployment) float64 { return float64(d.Status.Replicas) }),
	gauge("status_updated_replicas", "Machines of the latest template.",
		func(d *v1alpha1.MachineDeployment) float64 { return float64(d.Status.UpdatedReplicas) }),
	gauge("status_ready_replicas", "Machines that run.", func(d *v1alpha1.MachineDeployment) float64 { return float64(d.Status.ReadyReplicas) }),
	gauge("status_available_replicas", "Machines that can be worked with.",
		func(d *v1alpha1.MachineDeployment) float64 { return float64(d.Status.AvailableReplicas) }),
	gauge("status_unavailable_replicas", "Machines that are lacking.",
		func(d *v1alpha1.MachineDeployment) float64 { return float64(d.Status.UnavailableReplicas) }),
	gauge("status_preserved_failed_replicas", "Machines that are Failed and preserved.",
		func(d *v1alpha1.MachineDeployment) float64 { return float64(d.Status.PreservedFailedReplicas) }),
	gauge("status_failed_machines", "Machines whose last operation failed; failed_machines names 100 at most.",
		func(d *v1alpha1.MachineDeployment) float64 { return float64(d.Status.FailedMachineCount) }),
	optional("status_collision_count", "Names of machine sets that were taken.", func(d *v1alpha1.MachineDeployment) *int32 {
		return d.Status.CollisionCount
	}),
}

// A numbered metric is one with a value that some deployments have.
type numbered struct {
	desc  *prometheus.Desc
	value func(*v1alpha1.MachineDeployment) (float64, bool)
}

func gauge(name, help string, value func(*v1alpha1.MachineDeployment) float64) numbered {
	return numbered{
		desc:  prometheus.NewDesc(subsystem+"_"+name, help, []string{"name", "namespace"}, nil),
		value: func(d *v1alpha1.MachineDeployment) (float64, bool) { return value(d), true },
	}
}

// optional is a gauge that only deployments have whose field is set.
func optional(name, help string, value func(*v1alpha1.MachineDeployment) *int32) numbered {
	return numbered{
		desc: prometheus.NewDesc(subsystem+"_"+name, help, []string{"name", "namespace"}, nil),
		value: func(d *v1alpha1.MachineDeployment) (float64, bool) {
			v := value(d)
			if v == nil {
				return 0, false
			}

			return float64(*v), true
		},
	}
}

// NewInventory returns the metrics of all deployments that a manager's cache
// holds, until ctx ends. It is safe for concurrent use.
func NewInventory(ctx context.Context, deployments client.Reader) prometheus.Collector {
	all := []*prometheus.Desc{itemsDesc, infoDesc, conditionDesc, failedDesc}
	for _, g := range gauges {
		all = append(all, g.desc)
	}

	return inventory.New(ctx, deployments, inventory.Kind[*v1alpha1.MachineDeploymentList]{
		Name: "machine deployments", Metrics: all,
		List: func() *v1alpha1.MachineDeploymentList { return &v1alpha1.MachineDeploymentList{} },
		Collect: func(ch chan<- prometheus.Metric, list *v1alpha1.MachineDeploymentList) {
			inventory.Gauge(ch, itemsDesc, float64(len(list.Items)))
			for n := range list.Items {
				collect(ch, &list.Items[n])
			}
		},
	})
}

func collect(ch chan<- prometheus.Metric, d *v1alpha1.MachineDeployment) {
	send := func(desc *prometheus.Desc, value float64, labels ...string) {
		inventory.Gauge(ch, desc, value, append([]string{d.Name, d.Namespace}, labels...)...)
	}
	send(infoDesc, 1, strconv.FormatInt(d.CreationTimestamp.Unix(), 10), string(d.Spec.Strategy.Type))
	for _, g := range gauges {
		if value, ok := g.value(d); ok {
			send(g.desc, value)
		}
	}
	seen := map[v1alpha1.MachineDeploymentConditionType]bool{}
	for _, c := range d.Status.Conditions {
		if seen[c.Type] { // two equal series would spoil the scrape
			continue
		}
		seen[c.Type] = true
		send(conditionDesc, inventory.ConditionNumber(c.Status), string(c.Type))
	}
	listed := map[string]bool{}
	for _, m := range d.Status.FailedMachines {
		if listed[m.Name] {
			continue
		}
		listed[m.Name] = true
		send(failedDesc, 1, m.Name, m.ProviderID, m.OwnerRef, string(m.LastOperation.State), string(m.LastOperation.Type))
	}
}
