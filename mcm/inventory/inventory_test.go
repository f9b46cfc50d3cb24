package inventory

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// A shelf is a cache with so many nodes, or the error that reading it comes to.
type shelf struct {
	client.Reader

	nodes int
	err   error
}

func (s shelf) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	list.(*corev1.NodeList).Items = make([]corev1.Node, s.nodes)

	return s.err
}

// A scrape must not fail because one kind of object cannot be read.
func TestNew(t *testing.T) {
	t.Parallel()
	desc := prometheus.NewDesc("nodes", "Nodes there are.", nil, nil)
	for name, tc := range map[string]struct {
		reader shelf
		want   map[string]float64
	}{
		"read":       {shelf{nodes: 3}, map[string]float64{"nodes": 3, "other": 0}},
		"unreadable": {shelf{err: errors.New("the cache is not started")}, map[string]float64{"other": 0}},
	} {
		registry := prometheus.NewPedanticRegistry()
		registry.MustRegister(
			prometheus.NewGauge(prometheus.GaugeOpts{Name: "other", Help: "Something else."}),
			New(t.Context(), tc.reader, Kind[*corev1.NodeList]{
				Name: "nodes", Metrics: []*prometheus.Desc{desc},
				List:    func() *corev1.NodeList { return &corev1.NodeList{} },
				Collect: func(ch chan<- prometheus.Metric, list *corev1.NodeList) { Gauge(ch, desc, float64(len(list.Items))) },
			}))
		families, err := registry.Gather()
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		got := map[string]float64{}
		for _, f := range families {
			got[f.GetName()] = f.GetMetric()[0].GetGauge().GetValue()
		}
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%s: metrics (-want +got):\n%s", name, diff)
		}
	}
}

func TestConditionNumber(t *testing.T) {
	t.Parallel()
	for status, want := range map[corev1.ConditionStatus]float64{
		corev1.ConditionTrue: 1, corev1.ConditionFalse: 0, corev1.ConditionUnknown: 2, "": 2,
	} {
		if got := ConditionNumber(status); got != want {
			t.Errorf("status %q is %v, want %v", status, got, want)
		}
	}
}
