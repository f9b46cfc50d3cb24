package dispatch_test

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// A stream without a limit is never nearly full, by the arithmetic of an alert.
func TestStreamCollector(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewPedanticRegistry()
	if err := registry.Register(dispatch.StreamCollector(func() []caller.StreamState {
		return []caller.StreamState{
			{Provider: "acme", Ready: true, Leader: true, Bytes: 5, MaxBytes: 10}, {Provider: "other", Behind: 2, Rollbacks: 3, Bytes: 7, MaxBytes: -1},
		}
	})); err != nil {
		t.Fatal(err)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			got[f.GetName()+" "+m.GetLabel()[0].GetValue()] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	if diff := cmp.Diff(map[string]float64{
		"mcm_dispatch_operations_stream_ready acme": 1, "mcm_dispatch_operations_stream_ready other": 0,
		"mcm_dispatch_operations_stream_leader acme": 1, "mcm_dispatch_operations_stream_leader other": 0,
		"mcm_dispatch_operations_stream_replicas_behind acme": 0, "mcm_dispatch_operations_stream_replicas_behind other": 2,
		"mcm_dispatch_operations_stream_rollbacks_total acme": 0, "mcm_dispatch_operations_stream_rollbacks_total other": 3,
		"mcm_dispatch_operations_stream_bytes acme": 5, "mcm_dispatch_operations_stream_bytes other": 7,
		"mcm_dispatch_operations_stream_max_bytes acme": 10, "mcm_dispatch_operations_stream_max_bytes other": math.Inf(1),
	}, got); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}
