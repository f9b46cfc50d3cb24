package driversdk

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// metrics are the figures of one replica. Their labels hold no names of objects,
// so their number stays small.
type metrics struct {
	registry *prometheus.Registry

	operations *prometheus.CounterVec
	durations  *prometheus.HistogramVec
	running    *prometheus.GaugeVec
	slots      prometheus.Gauge
	fetches    *prometheus.CounterVec
	lookups    *prometheus.CounterVec
	changes    *prometheus.CounterVec
}

// newMetrics registers with registry; nil makes a new one, with the figures of
// the Go runtime and the process.
func newMetrics(registry *prometheus.Registry) (*metrics, error) {
	var process []prometheus.Collector
	if registry == nil {
		registry = prometheus.NewRegistry()
		process = append(process, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	}
	const namespace = "machinebus_driver"
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
	}
	m := &metrics{
		registry:   registry,
		operations: counter("operations_total", "Operations that ended, by operation and code.", "operation", "code"),
		durations: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: namespace, Name: "operation_duration_seconds",
			Help:    "Time from the receipt of an operation to its end.",
			Buckets: []float64{.005, .025, .1, .25, 1, 2.5, 10, 30, 60, 120, 300, 600},
		}, []string{"operation"}),
		running: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Namespace: namespace, Name: "operations_running",
			Help: "Operations that run now.",
		}, []string{"operation"}),
		slots: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: namespace, Name: "slots",
			Help: "Slots for each kind of operation: for creates and initializes together, for deletes, and for reads.",
		}),
		fetches: counter("fetches_total", "What was fetched from managers: class, secret or bootstrap, by code.", "what", "code"),
		lookups: counter("cache_lookups_total",
			"Classes and secrets that an operation needed, by whether the cache had them: hit or miss.", "what", "result"),
		changes: counter("changes_total", "Notices that a class or a secret has a new version.", "what"),
	}

	return m, register(registry, append(process,
		m.operations, m.durations, m.running, m.slots, m.fetches, m.lookups, m.changes)...)
}

func register(registry *prometheus.Registry, all ...prometheus.Collector) error {
	for _, c := range all {
		if err := registry.Register(c); err != nil {
			return fmt.Errorf("register metrics (each replica needs a registry of its own): %w", err)
		}
	}

	return nil
}

// watch adds the figures that are asked for when scraped.
func (m *metrics) watch(h *health) error {
	var gauges []prometheus.Collector
	for name, figure := range map[string]struct {
		help string
		is   func() bool
	}{
		"machinebus_driver_connected": {"1 while the replica is connected to NATS.", h.connected},
		"machinebus_driver_protocol_refused": {
			"1 while the replica takes no work from a manager that leads, as they share no version of the protocol.", h.refuses,
		},
		"machinebus_driver_draining": {"1 while the replica takes no more work because it is about to stop.", h.draining.Load},
	} {
		gauges = append(gauges, prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: figure.help}, func() float64 {
			if figure.is() {
				return 1
			}

			return 0
		}))
	}
	for op := driverv1.Operation_OPERATION_CREATE; op <= driverv1.Operation_OPERATION_NODE_GROUPS; op++ {
		gauges = append(gauges, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "machinebus_driver_operations_stuck", ConstLabels: prometheus.Labels{"operation": bus.Verb(op)},
			Help: "Calls that ignore their deadlines and have not returned: they keep their slots, and their machines from this replica.",
		}, func() float64 { return float64(h.stuck(op)) }))
	}

	return register(m.registry, gauges...)
}

// begin counts an operation as running until the returned function is called.
func (m *metrics) begin(op driverv1.Operation) (end func()) {
	running := m.running.WithLabelValues(bus.Verb(op))
	running.Inc()

	return running.Dec
}

// settled counts an operation that ended, those that panicked included.
func (m *metrics) settled(op driverv1.Operation, code Code, took time.Duration) {
	m.operations.WithLabelValues(bus.Verb(op), bus.CodeName(code)).Inc()
	m.durations.WithLabelValues(bus.Verb(op)).Observe(took.Seconds())
}

func (m *metrics) fetched(what string, err error) {
	m.fetches.WithLabelValues(what, bus.CodeName(CodeOf(err))).Inc()
}

func (m *metrics) looked(what string, hit bool) {
	result := "miss"
	if hit {
		result = "hit"
	}
	m.lookups.WithLabelValues(what, result).Inc()
}

func (m *metrics) changed(what string) { m.changes.WithLabelValues(what).Inc() }
