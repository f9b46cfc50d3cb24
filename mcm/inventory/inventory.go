// Package inventory exports metrics of all objects of one kind. It reads a manager's
// cache at each scrape, so the metrics of deleted objects disappear. The package of the
// kind's controller says which metrics an object has. Counters of events are kept elsewhere.
package inventory

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// listTimeout is how long a scrape may wait for the cache.
const listTimeout = 5 * time.Second

// A Kind describes the metrics of one kind's objects.
type Kind[L client.ObjectList] struct {
	// Name is the plural, for logs.
	Name string
	// Metrics describes all metrics that Collect sends.
	Metrics []*prometheus.Desc
	// List returns an empty list of the kind.
	List func() L
	// Collect sends the metrics of a list. It must not change the objects, which belong
	// to the cache; there may be thousands. It may be called concurrently.
	Collect func(ch chan<- prometheus.Metric, list L)
}

// New returns a collector of the metrics of all objects of a kind in reader. It works
// until ctx ends, and is safe for concurrent use.
func New[L client.ObjectList](ctx context.Context, reader client.Reader, kind Kind[L]) prometheus.Collector {
	return &collector[L]{ctx, reader, kind}
}

type collector[L client.ObjectList] struct {
	ctx    context.Context
	reader client.Reader
	kind   Kind[L]
}

// Describe implements prometheus.Collector.
func (c *collector[L]) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range c.kind.Metrics {
		ch <- d
	}
}

// Collect implements prometheus.Collector. It sends nothing if the list cannot be read:
// an invalid metric would fail the whole scrape.
func (c *collector[L]) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(c.ctx, listTimeout)
	defer cancel()
	list := c.kind.List()
	if err := c.reader.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		ctrl.LoggerFrom(c.ctx).V(1).Info("cannot list "+c.kind.Name+": this scrape has no metrics of them", "err", err.Error())

		return
	}
	c.kind.Collect(ch, list)
}

// Gauge sends one value, for the labels' values in the order of its description.
func Gauge(ch chan<- prometheus.Metric, d *prometheus.Desc, value float64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
}

// ConditionNumber returns a condition's status as the machine controller manager exports
// it: 1 for True, 0 for False, 2 for anything else.
func ConditionNumber(status corev1.ConditionStatus) float64 {
	switch status {
	case corev1.ConditionTrue:
		return 1
	case corev1.ConditionFalse:
		return 0
	default:
		return 2
	}
}
