package dispatch

import (
	"math"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/machinebus/machinebus/bus"
)

var (
	streamReady = prometheus.NewDesc("mcm_dispatch_operations_stream_ready",
		"1 if operations of the provider are claimed and dead replicas fenced; 0 if JetStream or the stream is missing.",
		[]string{"provider"}, nil)
	streamBytes = prometheus.NewDesc("mcm_dispatch_operations_stream_bytes",
		"What the operations stream of the provider held at the last look; 0 before it.", []string{"provider"}, nil)
	streamMaxBytes = prometheus.NewDesc("mcm_dispatch_operations_stream_max_bytes",
		"What it may hold, +Inf for no limit. A full one takes nothing: operations wait, and replicas are fenced.", []string{"provider"}, nil)
)

// streamCollector shows the operations streams as metrics.
type streamCollector func() []bus.StreamState

// StreamCollector returns a collector of what states returns; bus.Caller.Streams
// is such a function.
func StreamCollector(states func() []bus.StreamState) prometheus.Collector {
	return streamCollector(states)
}

// Describe implements [prometheus.Collector].
func (c streamCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- streamReady
	ch <- streamBytes
	ch <- streamMaxBytes
}

// Collect implements [prometheus.Collector].
func (c streamCollector) Collect(ch chan<- prometheus.Metric) {
	for _, s := range c() {
		ready := 0.0
		if s.Ready {
			ready = 1
		}
		ch <- prometheus.MustNewConstMetric(streamReady, prometheus.GaugeValue, ready, s.Provider)
		ch <- prometheus.MustNewConstMetric(streamBytes, prometheus.GaugeValue, float64(s.Bytes), s.Provider)
		limit := float64(s.MaxBytes)
		if s.MaxBytes < 0 {
			limit = math.Inf(1)
		}
		ch <- prometheus.MustNewConstMetric(streamMaxBytes, prometheus.GaugeValue, limit, s.Provider)
	}
}
