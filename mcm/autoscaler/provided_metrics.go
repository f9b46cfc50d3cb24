package autoscaler

import "github.com/prometheus/client_golang/prometheus"

var (
	providedGroups = prometheus.NewDesc("mcm_autoscaler_provider_node_groups",
		"Node groups that the drivers of a provider serve over the bus, as last told.", []string{"provider"}, nil)
	providedAge = prometheus.NewDesc("mcm_autoscaler_provider_answer_age_seconds",
		"Time since a provider last told of its node groups; they are left out after a minute.", []string{"provider"}, nil)
	providedInstancesAge = prometheus.NewDesc("mcm_autoscaler_provider_instances_age_seconds",
		"Time since a provider last told the instances of a node group, which count for as long as it tells of the group. "+
			"A group of which they were never told is not here, and left out.", []string{"provider", "node_group"}, nil)
)

// Describe is of [prometheus.Collector].
func (p *Provided) Describe(ch chan<- *prometheus.Desc) {
	ch <- providedGroups
	ch <- providedAge
	ch <- providedInstancesAge
}

// Collect is of [prometheus.Collector].
func (p *Provided) Collect(ch chan<- prometheus.Metric) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for provider, state := range p.providers {
		if state.heard.IsZero() {
			continue
		}
		ch <- prometheus.MustNewConstMetric(providedGroups, prometheus.GaugeValue, float64(len(state.groups)), provider)
		ch <- prometheus.MustNewConstMetric(providedAge, prometheus.GaugeValue, p.now().Sub(state.heard).Seconds(), provider)
		for id, g := range state.groups {
			if g.known() {
				ch <- prometheus.MustNewConstMetric(providedInstancesAge, prometheus.GaugeValue, p.now().Sub(g.listed).Seconds(), provider, id)
			}
		}
	}
}
