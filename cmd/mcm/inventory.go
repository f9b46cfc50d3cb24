package main

import (
	"context"
	"errors"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// scrapeFailures counts what a scrape could not read, by what the machine controller
// manager calls it, and by the program that tells it there: mcm is both.
var scrapeFailures = prometheus.NewCounterVec(prometheus.CounterOpts{
	Name: "mcm_misc_scrape_failure_total",
	Help: "Scrapes that lack the metrics of machines, sets or deployments because the cache could not be read.",
}, []string{"kind", "binary"})

// registerInventory registers a collector of what a cache holds. Replicas that stand
// by hold the same, and each machine would count as often as there are replicas; so
// the leader alone tells it, as in the machine controller manager.
func (m *mcm) registerInventory(c prometheus.Collector) error {
	return register([]prometheus.Collector{whileLeading{c, m.manager.Elected()}})
}

// whileLeading is a collector that has nothing to tell until elected is closed. Who
// loses the lead ends.
type whileLeading struct {
	prometheus.Collector

	elected <-chan struct{}
}

// Collect implements prometheus.Collector.
func (w whileLeading) Collect(ch chan<- prometheus.Metric) {
	select {
	case <-w.elected:
		w.Collector.Collect(ch)
	default:
	}
}

// counted returns a reader for an inventory whose failures are counted as those of
// a kind. A cache that has not begun yet is none.
func counted(reader client.Reader, kind string) client.Reader {
	binary := "machine-controller-manager"
	if kind == "Machine-count" {
		binary += "-provider"
	}

	return countedReader{reader, scrapeFailures.WithLabelValues(kind, binary)}
}

type countedReader struct {
	client.Reader

	failures prometheus.Counter
}

// List implements client.Reader.
func (r countedReader) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	err := r.Reader.List(ctx, list, opts...)
	if _, early := errors.AsType[*cache.ErrCacheNotStarted](err); err != nil && !early {
		r.failures.Inc()
	}

	return err
}
