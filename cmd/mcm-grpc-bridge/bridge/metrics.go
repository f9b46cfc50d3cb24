package bridge

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	dto "github.com/prometheus/client_model/go"
)

// metrics are the figures of the server, and of each replica with labels that say which. It
// implements prometheus.Gatherer.
type metrics struct {
	own           *prometheus.Registry
	registrations *prometheus.CounterVec
	refusals      *prometheus.CounterVec
	streams       *prometheus.GaugeVec

	mu       sync.Mutex
	replicas map[int]*labelled // by stream
}

func newMetrics() *metrics {
	const namespace = "machinebus_grpc_bridge"
	m := &metrics{
		own: prometheus.NewRegistry(),
		registrations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: namespace, Name: "registrations_total",
			Help: "Drivers that wanted to register, by outcome: accepted or refused.",
		}, []string{"outcome"}),
		refusals: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: namespace, Name: "refused_reads_total",
			Help: "Reads of classes and secrets that no operation of the driver needed, by what was asked for: class or secret.",
		}, []string{"what"}),
		streams: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Namespace: namespace, Name: "streams",
			Help: "Registered drivers, by kind of class and provider.",
		}, []string{"kind", "provider"}),
		replicas: map[int]*labelled{},
	}
	m.own.MustRegister(m.registrations, m.refusals, m.streams,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))

	return m
}

func (m *metrics) registered(outcome string) { m.registrations.WithLabelValues(outcome).Inc() }

func (m *metrics) refused(what string) { m.refusals.WithLabelValues(what).Inc() }

// addReplica adds the figures of a stream's replica until the returned function is called.
func (m *metrics) addReplica(figures prometheus.Gatherer, stream int, kind, provider string) (remove func()) {
	m.streams.WithLabelValues(kind, provider).Inc()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.replicas[stream] = &labelled{figures, map[string]string{"provider": provider, "stream": strconv.Itoa(stream)}}

	return func() {
		m.streams.WithLabelValues(kind, provider).Dec()
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.replicas, stream)
	}
}

// ready returns nil if a registered driver's replica is connected to NATS, else why none is.
func (m *metrics) ready() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, replica := range m.replicas {
		families, err := replica.figures.Gather()
		if err != nil {
			return err
		}
		for _, family := range families {
			if family.GetName() == "machinebus_driver_connected" && family.GetMetric()[0].GetGauge().GetValue() == 1 {
				return nil
			}
		}
	}
	if len(m.replicas) == 0 {
		return errors.New("no driver is registered")
	}

	return errors.New("drivers are registered, and none of their replicas is connected to NATS")
}

// Gather returns all figures.
func (m *metrics) Gather() ([]*dto.MetricFamily, error) {
	all := prometheus.Gatherers{m.own}
	m.mu.Lock()
	for _, replica := range m.replicas {
		all = append(all, replica)
	}
	m.mu.Unlock()

	return all.Gather()
}

// labelled adds labels to figures.
type labelled struct {
	figures prometheus.Gatherer
	labels  map[string]string
}

func (l *labelled) Gather() ([]*dto.MetricFamily, error) {
	families, err := l.figures.Gather()
	if err != nil {
		return nil, fmt.Errorf("figures of stream %s: %w", l.labels["stream"], err)
	}
	for _, family := range families {
		for _, metric := range family.GetMetric() {
			labels := slices.Clone(metric.GetLabel()) // the metric's own slice is shared
			for name, value := range l.labels {
				labels = append(labels, &dto.LabelPair{Name: &name, Value: &value})
			}
			slices.SortFunc(labels, func(a, b *dto.LabelPair) int { return cmp.Compare(a.GetName(), b.GetName()) })
			metric.Label = labels
		}
	}

	return families, nil
}
