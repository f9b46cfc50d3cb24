package dispatch

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
)

var replicasRefused = prometheus.NewDesc("mcm_dispatch_replicas_refused",
	"Living driver replicas of the provider that get no work: they share no version of the protocol with this manager.",
	[]string{"provider"}, nil)

// refusedCollector exports the number of replicas that get no work.
type refusedCollector func() []caller.Replica

// RefusedCollector returns a collector of the replicas that share no protocol version with
// this manager; replicas returns the live ones, such as caller.Caller.Replicas.
func RefusedCollector(replicas func() []caller.Replica) prometheus.Collector {
	return refusedCollector(replicas)
}

// Describe implements [prometheus.Collector].
func (c refusedCollector) Describe(ch chan<- *prometheus.Desc) { ch <- replicasRefused }

// Collect implements [prometheus.Collector].
func (c refusedCollector) Collect(ch chan<- prometheus.Metric) {
	refused := map[string]int{}
	for _, r := range c() {
		n := 0
		if bus.Refused(r.Session) != nil {
			n = 1
		}
		refused[r.Session.GetProvider()] += n
	}
	for provider, n := range refused {
		ch <- prometheus.MustNewConstMetric(replicasRefused, prometheus.GaugeValue, float64(n), provider)
	}
}
