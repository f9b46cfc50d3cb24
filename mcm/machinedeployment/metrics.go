package machinedeployment

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// collectTimeout bounds a scrape while the cache is still being filled.
const collectTimeout = 2 * time.Second

// Names and labels are those that dashboards made for the machine controller
// manager look for.
const subsystem = "mcm_machine_deployment"

var (
	itemsDesc = prometheus.NewDesc(subsystem+"_items_total", "Machine deployments there are.", nil, nil)
	infoDesc  = prometheus.NewDesc(subsystem+"_info", "Facts about a machine deployment; the value is its creation time.",
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

// Collector returns metrics of the deployments in the cache: what is deleted is
// gone from them, too.
func (r *Reconciler) Collector() prometheus.Collector { return collector{r.Control} }

type collector struct{ reader client.Reader }

// Describe sends nothing: which metrics there are depends on the deployments.
func (collector) Describe(chan<- *prometheus.Desc) {}

// Collect sends one set of metrics for each deployment.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), collectTimeout) //nolint:forbidigo // a scrape has no context
	defer cancel()
	list := &v1alpha1.MachineDeploymentList{}
	if err := c.reader.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		ch <- prometheus.NewInvalidMetric(itemsDesc, err)

		return
	}
	//nolint:promlinter // the name is what dashboards look for
	ch <- prometheus.MustNewConstMetric(itemsDesc, prometheus.GaugeValue, float64(len(list.Items)))
	for i := range list.Items {
		collect(ch, &list.Items[i])
	}
}

func collect(ch chan<- prometheus.Metric, d *v1alpha1.MachineDeployment) {
	send := func(desc *prometheus.Desc, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, append([]string{d.Name, d.Namespace}, labels...)...)
	}
	send(infoDesc, float64(d.CreationTimestamp.Unix()), d.CreationTimestamp.UTC().Format(time.RFC3339), string(d.Spec.Strategy.Type))
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
		send(conditionDesc, numberOf(c.Status), string(c.Type))
	}
	told := map[string]bool{}
	for _, m := range d.Status.FailedMachines {
		if told[m.Name] {
			continue
		}
		told[m.Name] = true
		send(failedDesc, 1, m.Name, m.ProviderID, m.OwnerRef, string(m.LastOperation.State), string(m.LastOperation.Type))
	}
}

func numberOf(status corev1.ConditionStatus) float64 {
	switch status {
	case corev1.ConditionTrue:
		return 1
	case corev1.ConditionFalse:
		return 0
	default:
		return 2
	}
}
