package main

import (
	"context"
	"errors"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// scrapeFailures counts failed reads of a scrape. Its labels are those of the machine
// controller manager, where two programs export it.
var scrapeFailures = prometheus.NewCounterVec(prometheus.CounterOpts{
	Name: "mcm_misc_scrape_failure_total",
	Help: "Scrapes that lack the metrics of machines, sets or deployments because the cache could not be read.",
}, []string{"kind", "binary"})

// registerInventory registers a collector of objects in the cache. Only the leader
// exports them, as in the machine controller manager: otherwise each machine would
// count once for each replica of mcm.
func (m *mcm) registerInventory(c prometheus.Collector) error {
	return register([]prometheus.Collector{whileLeading{c, m.manager.Elected()}})
}

// whileLeading collects nothing until elected is closed. A process that loses the lead
// exits.
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

// counted returns a reader whose failures are counted for a kind. A cache that has not
// started yet does not count as a failure.
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
