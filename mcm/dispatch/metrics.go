package dispatch

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
)

// metrics count operations by provider, operation and code. They are safe for
// concurrent use.
type metrics struct {
	inFlight *prometheus.GaugeVec
	waiting  *prometheus.GaugeVec
	turns    *prometheus.HistogramVec
	waited   *prometheus.HistogramVec
	took     *prometheus.HistogramVec
	attempts *prometheus.CounterVec

	// Metrics of the machine controller manager's drivers.
	answered *prometheus.HistogramVec
	failed   *prometheus.CounterVec
}

// driverMethods are the names of operations in the metrics of those drivers.
var driverMethods = map[Kind]string{
	Create: "create_machine", Initialize: "initialize_machine", Delete: "delete_machine",
	Status: "get_machine_status", listKind: "list_machine",
}

func newMetrics() *metrics {
	// From a quick status read to a create that takes ten minutes.
	buckets := []float64{.005, .025, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 180, 600}

	return &metrics{
		inFlight: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "mcm_dispatch_operations_in_flight",
			Help: "Operations that have begun and not ended.",
		}, []string{"provider", "operation"}),
		waiting: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "mcm_dispatch_operations_queued",
			Help: "Operations that wait for a driver, for a free slot of a driver, or for a limit.",
		}, []string{"provider", "operation"}),
		turns: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "mcm_dispatch_operation_queue_seconds", Buckets: buckets,
			Help: "Time that operations waited for a free slot of a driver or for a limit, without those that did not wait.",
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
		answered: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "mcm_cloud_api_driver_request_duration_seconds", Buckets: buckets,
			Help: "Time that drivers took for requests that succeeded.",
		}, []string{"provider", "operation"}),
		failed: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "mcm_cloud_api_driver_requests_failed_total",
			Help: "Requests to drivers that failed, by the number of the code.",
		}, []string{"provider", "operation", "error_code"}),
	}
}

// Collectors returns the dispatcher's metrics for registration.
func (d *Dispatcher) Collectors() []prometheus.Collector {
	m := d.metrics

	return []prometheus.Collector{m.inFlight, m.waiting, m.turns, m.waited, m.took, m.attempts, m.answered, m.failed}
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

func (m *metrics) finished(provider string, kind Kind, err error, out *caller.Outcome) {
	code := CodeOf(err)
	m.waited.WithLabelValues(provider, string(kind)).Observe(out.Waited.Seconds())
	m.took.WithLabelValues(provider, string(kind), code.String()).Observe(out.Took.Seconds())
	m.attempts.WithLabelValues(provider, string(kind), code.String()).Add(float64(out.Attempts))
	m.asked(provider, kind, err, out)
}

// asked counts a request, unless no driver got it.
func (m *metrics) asked(provider string, kind Kind, err error, out *caller.Outcome) {
	if bus.NothingRan(err) || out.Attempts == 0 && out.Result == nil {
		return
	}
	method := driverMethods[kind]
	if err != nil {
		m.failed.WithLabelValues(provider, method, strconv.Itoa(int(CodeOf(err)))).Inc()

		return
	}
	m.answered.WithLabelValues(provider, method).Observe(out.Took.Seconds())
}
