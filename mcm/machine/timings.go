package machine

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// A stage is a part of a machine's life that is timed.
type stage string

const (
	stageCreate     stage = "create"     // from the machine's creation until its instance is stored
	stageInitialize stage = "initialize" // as long as the driver took for the try that succeeded
	stageJoin       stage = "join"       // from the machine's creation until its Node was healthy
	stageDelete     stage = "delete"     // from the wish to delete it until all of it was gone
)

// timings measure how long the stages of machines' lives take, and how many machines
// never joined. Only passes know that, so only the leader's are fed. They are safe for
// concurrent use; the zero value is ready. Series are those of pools and not of
// machines; they stay until the process ends, as counters have to.
type timings struct {
	once   sync.Once
	last   map[stage]*prometheus.GaugeVec
	took   *prometheus.HistogramVec
	failed *prometheus.CounterVec
}

// made returns t with its metrics.
func (t *timings) made() *timings {
	t.once.Do(func() {
		labels := []string{"namespace", "machine_deployment", "instance_type", "zone"}
		t.last = map[stage]*prometheus.GaugeVec{}
		for s, help := range map[stage]string{
			stageCreate:     "Time from the creation of the latest machine that got an instance until it had it.",
			stageInitialize: "Time that the driver took to initialize the latest instance.",
			stageJoin:       "Time from the creation of the latest machine that joined until it had.",
			stageDelete:     "Time from the deletion of the latest machine that is gone until it was.",
		} {
			// What reads them for the machine controller manager wants gauges.
			t.last[s] = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "mcm_machine_" + string(s) + "_duration_seconds", Help: help}, labels)
		}
		t.took = prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "mcm_machine_stage_duration_seconds",
			Help: "Time that machines took to get an instance (create), to have it initialized, to join, and to be deleted.",
			// From a quick cloud to a drain of two hours.
			Buckets: []float64{1, 5, 15, 30, 60, 120, 180, 300, 600, 1200, 1800, 3600, 7200},
		}, []string{"namespace", "machine_deployment", "stage"})
		//nolint:promlinter // the name is what dashboards look for
		t.failed = prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "mcm_machine_num_failed_join",
			Help: "Machines that did not join in time.",
		}, labels)
	})

	return t
}

func (t *timings) collectors() []prometheus.Collector {
	t.made()
	all := []prometheus.Collector{t.took, t.failed}
	for _, g := range t.last {
		all = append(all, g)
	}

	return all
}

// A machineKind is the group that timings are kept for: a pool's machines of one instance
// type and zone. Each but the namespace may be empty.
type machineKind struct{ namespace, deployment, instanceType, zone string }

func (k machineKind) labels() []string {
	return []string{k.namespace, k.deployment, k.instanceType, k.zone}
}

// observe notes that a stage took that long. The API server's clock, from which
// many count, may be ahead of ours.
func (t *timings) observe(k machineKind, s stage, took time.Duration) {
	seconds := max(0, took.Seconds())
	t.made().last[s].WithLabelValues(k.labels()...).Set(seconds)
	t.took.WithLabelValues(k.namespace, k.deployment, string(s)).Observe(seconds)
}

func (t *timings) failedToJoin(k machineKind) { t.made().failed.WithLabelValues(k.labels()...).Inc() }

// metricsKind finds out what kind of machine this is, by the class in the cache: most
// steps need none. The zone is the one that the Node is labelled with, or else the
// class's.
func (c *machineClass) metricsKind(ctx context.Context) machineKind {
	m := c.machine
	k := machineKind{
		namespace: m.Namespace, deployment: m.Labels[v1alpha1.LabelKeyMachineDeployment],
		zone: m.Spec.NodeTemplateSpec.Labels[corev1.LabelTopologyZone],
	}
	class := c.Object
	if class == nil {
		class = &v1alpha1.MachineClass{}
		key := client.ObjectKey{Namespace: m.Namespace, Name: m.Spec.Class.Name}
		if err := c.control.Get(ctx, key, class, client.UnsafeDisableDeepCopy); err != nil {
			c.log.V(1).Info("a duration is recorded without the instance type", "err", err.Error())

			return k
		}
	}
	if t := class.NodeTemplate; t != nil {
		k.instanceType = t.InstanceType
		if k.zone == "" {
			k.zone = t.Zone
		}
	}

	return k
}
