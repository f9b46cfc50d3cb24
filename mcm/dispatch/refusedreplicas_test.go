package dispatch_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/mcm/dispatch"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestRefusedCollector(t *testing.T) {
	t.Parallel()
	replica := func(provider string, lowest, highest uint32) caller.Replica {
		return caller.Replica{Session: &driverv1.Session{Provider: provider, ProtocolMin: lowest, Protocol: highest}}
	}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(dispatch.RefusedCollector(func() []caller.Replica {
		return []caller.Replica{replica("mixed", 1, 1), replica("mixed", 5, 7), replica("old", 0, 0), replica("wide", 1, 7), replica("later", 5, 7)}
	}))
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, m := range families[0].GetMetric() {
		got[m.GetLabel()[0].GetValue()] = m.GetGauge().GetValue()
	}
	if diff := cmp.Diff(map[string]float64{"mixed": 1, "old": 0, "wide": 0, "later": 1}, got); diff != "" {
		t.Errorf("refused replicas (-want +got):\n%s", diff)
	}
}
