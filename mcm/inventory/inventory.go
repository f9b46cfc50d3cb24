// Package inventory makes metrics of all objects of one kind, at each scrape, from a
// manager's cache: what is deleted is gone from them, too. Which metrics an object has is
// for the package of its controller; what happens to be counted while a program runs is
// not for this one.
package inventory

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// limit is how long a scrape may wait for the cache.
const limit = 5 * time.Second

// A Kind says what is told of one kind's objects.
type Kind[L client.ObjectList] struct {
	// Name is the plural, for people.
	Name string
	// Metrics are all that Collect sends.
	Metrics []*prometheus.Desc
	// List returns an empty list of the kind.
	List func() L
	// Collect sends the metrics of a list, whose objects are the cache's own: there may
	// be thousands, and it must not change them. It may be called concurrently.
	Collect func(ch chan<- prometheus.Metric, list L)
}

// New returns the metrics of all objects of a kind that a reader holds, until ctx ends. It
// is safe for concurrent use.
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

// Collect implements prometheus.Collector. What cannot be read is left out: an
// invalid metric would make the whole scrape fail, all others included.
func (c *collector[L]) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(c.ctx, limit)
	defer cancel()
	list := c.kind.List()
	if err := c.reader.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		ctrl.LoggerFrom(c.ctx).V(1).Info("no metrics of "+c.kind.Name, "err", err.Error())

		return
	}
	c.kind.Collect(ch, list)
}

// Gauge sends one value, for the labels' values in the order of its description.
func Gauge(ch chan<- prometheus.Metric, d *prometheus.Desc, value float64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
}

// ConditionNumber is a condition's status as a value: 1 for True, 0 for False, 2 for all
// else, as the machine controller manager has it.
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
