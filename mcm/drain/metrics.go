package drain

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics count drains and evictions.
type metrics struct {
	inFlight  prometheus.Gauge
	last      *prometheus.GaugeVec
	took      *prometheus.HistogramVec
	evictions *prometheus.CounterVec
}

// Results of tries to evict a pod.
const (
	evicted = "accepted"
	refused = "refused"
	failed  = "failed"
	deleted = "deleted" // without asking its budgets
)

func newMetrics() *metrics {
	return &metrics{
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "mcm_machine_drains_in_flight",
			Help: "Drains that have started and not ended.",
		}),
		// A gauge, as in the machine controller manager.
		last: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "mcm_machine_drain_duration_seconds",
			Help: "Duration of the latest drain, succeeded or failed.",
		}, []string{"namespace", "machine_deployment"}),
		took: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "mcm_drain_duration_seconds",
			Help: "Duration of drains, succeeded or failed.",
			// From an empty Node to the two hours that a drain may take by default.
			Buckets: []float64{.1, 1, 5, 15, 30, 60, 180, 600, 1800, 3600, 7200},
		}, []string{"namespace", "machine_deployment"}),
		evictions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "mcm_machine_drain_evictions_total",
			Help: "Tries to evict a pod, by result: accepted, refused by a budget, failed, or deleted without asking budgets.",
		}, []string{"result"}),
	}
}

// Collectors returns the drainer's metrics for registration.
func (d *Drainer) Collectors() []prometheus.Collector {
	return []prometheus.Collector{d.metrics.inFlight, d.metrics.last, d.metrics.took, d.metrics.evictions}
}

func (m *metrics) started() (ended func()) {
	m.inFlight.Inc()

	return m.inFlight.Dec
}

func (m *metrics) finished(req *Request, took time.Duration) {
	m.last.WithLabelValues(req.Machine.Namespace, req.Deployment).Set(took.Seconds())
	m.took.WithLabelValues(req.Machine.Namespace, req.Deployment).Observe(took.Seconds())
}
