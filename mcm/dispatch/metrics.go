package dispatch

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/machinebus/machinebus/bus"
)

// metrics count operations by provider, operation and code.
type metrics struct {
	inFlight *prometheus.GaugeVec
	waiting  *prometheus.GaugeVec
	turns    *prometheus.HistogramVec
	waited   *prometheus.HistogramVec
	took     *prometheus.HistogramVec
	attempts *prometheus.CounterVec
}

func newMetrics() *metrics {
	// From a quick status read to a create that takes ten minutes.
	buckets := []float64{.005, .025, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 180, 600}

	return &metrics{
		inFlight: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "mcm_dispatch_operations_in_flight",
			Help: "Operations begun and not ended.",
		}, []string{"provider", "operation"}),
		waiting: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "mcm_dispatch_operations_queued",
			Help: "Operations that wait for a driver, for room at the drivers or for a limit.",
		}, []string{"provider", "operation"}),
		turns: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "mcm_dispatch_operation_queue_seconds", Buckets: buckets,
			Help: "Time that operations waited for room at the drivers or for a limit, of those that had to.",
		}, []string{"provider", "operation"}),
		waited: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "mcm_dispatch_operation_wait_seconds", Buckets: buckets,
			Help: "Time until a driver replica took the operation.",
		}, []string{"provider", "operation"}),
		took: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "mcm_dispatch_operation_duration_seconds", Buckets: buckets,
			Help: "Time a driver took for the operation, by the code it ended with.",
		}, []string{"provider", "operation", "code"}),
		attempts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "mcm_dispatch_attempts_total",
			Help: "Attempts at operations that ended, by the code they ended with; more than operations ended means lost replicas.",
		}, []string{"provider", "operation", "code"}),
	}
}

// Collectors returns the dispatcher's metrics for registration.
func (d *Dispatcher) Collectors() []prometheus.Collector {
	m := d.metrics

	return []prometheus.Collector{m.inFlight, m.waiting, m.turns, m.waited, m.took, m.attempts}
}

func (m *metrics) started(provider string, kind Kind) (ended func()) {
	g := m.inFlight.WithLabelValues(provider, string(kind))
	g.Inc()

	return g.Dec
}

func (m *metrics) queued(provider string, kind Kind) (granted func()) {
	g := m.waiting.WithLabelValues(provider, string(kind))
	g.Inc()

	return g.Dec
}

func (m *metrics) finished(provider string, kind Kind, code Code, out *bus.Outcome) {
	m.waited.WithLabelValues(provider, string(kind)).Observe(out.Waited.Seconds())
	m.took.WithLabelValues(provider, string(kind), code.String()).Observe(out.Took.Seconds())
	m.attempts.WithLabelValues(provider, string(kind), code.String()).Add(float64(out.Attempts))
}
