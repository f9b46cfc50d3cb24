package orphans

import "github.com/prometheus/client_golang/prometheus"

// Metrics count what a Collector finds and does.
type Metrics struct {
	passes     *prometheus.CounterVec
	orphans    *prometheus.GaugeVec
	duplicates *prometheus.GaugeVec
	foreign    *prometheus.GaugeVec
	found      *prometheus.CounterVec
	deletions  *prometheus.CounterVec
}

// NewMetrics returns Metrics that are not registered yet.
func NewMetrics() *Metrics {
	return &Metrics{
		passes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "mcm_safety_orphan_passes_total",
			Help: "Looks for instances without a machine, by outcome: done, unread (an API server could not be read), " +
				"doubtful (so many Machines or instances were missing that nothing, or nothing of one class, is deleted), " +
				"barred (another control plane of the same name is on the bus).",
		}, []string{"outcome"}),
		orphans: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "mcm_safety_orphans",
			Help: "Instances without a machine at the last look, by the class that lists them.",
		}, []string{"namespace", "class"}),
		duplicates: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "mcm_safety_duplicates",
			Help: "Instances at the last look that were created for a machine which has another instance.",
		}, []string{"namespace", "class"}),
		foreign: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "mcm_safety_foreign_instances",
			Help: "Instances without a machine at the last look that are never deleted because their owner is not " +
				"this control cluster, by reason: no_owner, other_owner.",
		}, []string{"namespace", "class", "reason"}),
		found: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "mcm_safety_orphans_found_total",
			Help: "Instances without a machine that were found.",
		}, []string{"provider"}),
		deletions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "mcm_safety_orphan_deletions_total",
			Help: "Deletes of instances without a machine, by the code they ended with.",
		}, []string{"provider", "code"}),
	}
}

// Collectors returns the metrics for registration.
func (m *Metrics) Collectors() []prometheus.Collector {
	return []prometheus.Collector{m.passes, m.orphans, m.duplicates, m.foreign, m.found, m.deletions}
}
