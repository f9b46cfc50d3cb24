package dispatch

import (
	"math"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/machinebus/machinebus/bus/caller"
)

var (
	streamReady = prometheus.NewDesc("mcm_dispatch_operations_stream_ready",
		"1 if the operations stream of the provider takes writes; 0 if not: creates and deletes wait.",
		[]string{"provider"}, nil)
	streamBytes = prometheus.NewDesc("mcm_dispatch_operations_stream_bytes",
		"Size of the operations stream of the provider when it was last read; 0 before.", []string{"provider"}, nil)
	streamMaxBytes = prometheus.NewDesc("mcm_dispatch_operations_stream_max_bytes",
		"Limit of that size, +Inf for none. A full stream takes no writes: creates and deletes wait.", []string{"provider"}, nil)
	streamLeader = prometheus.NewDesc("mcm_dispatch_operations_stream_leader",
		"1 if the operations stream of the provider has a leader among the NATS servers; 0 if not, or if none answers.",
		[]string{"provider"}, nil)
	streamBehind = prometheus.NewDesc("mcm_dispatch_operations_stream_replicas_behind",
		"NATS servers that hold the operations stream of the provider and are offline or lag.", []string{"provider"}, nil)
	streamRollbacks = prometheus.NewDesc("mcm_dispatch_operations_stream_rollbacks_total",
		"Times that the operations stream of the provider was found without records that it had acknowledged.", []string{"provider"}, nil)
)

// streamCollector exports the states of the operations streams.
type streamCollector func() []caller.StreamState

// StreamCollector returns a collector of the states that a function returns, such as
// caller.Caller.Streams.
func StreamCollector(states func() []caller.StreamState) prometheus.Collector {
	return streamCollector(states)
}

// Describe implements [prometheus.Collector].
func (c streamCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- streamReady
	ch <- streamBytes
	ch <- streamMaxBytes
	ch <- streamLeader
	ch <- streamBehind
	ch <- streamRollbacks
}

// Collect implements [prometheus.Collector].
func (c streamCollector) Collect(ch chan<- prometheus.Metric) {
	for _, s := range c() {
		ch <- prometheus.MustNewConstMetric(streamReady, prometheus.GaugeValue, oneIf(s.Ready), s.Provider)
		ch <- prometheus.MustNewConstMetric(streamLeader, prometheus.GaugeValue, oneIf(s.Leader), s.Provider)
		ch <- prometheus.MustNewConstMetric(streamBehind, prometheus.GaugeValue, float64(s.Behind), s.Provider)
		ch <- prometheus.MustNewConstMetric(streamRollbacks, prometheus.CounterValue, float64(s.Rollbacks), s.Provider)
		ch <- prometheus.MustNewConstMetric(streamBytes, prometheus.GaugeValue, float64(s.Bytes), s.Provider)
		limit := float64(s.MaxBytes)
		if s.MaxBytes < 0 {
			limit = math.Inf(1)
		}
		ch <- prometheus.MustNewConstMetric(streamMaxBytes, prometheus.GaugeValue, limit, s.Provider)
	}
}

func oneIf(is bool) float64 {
	if is {
		return 1
	}

	return 0
}
