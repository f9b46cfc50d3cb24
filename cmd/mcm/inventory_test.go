package main

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/machine"
	"github.com/machinebus/machinebus/mcm/machinedeployment"
	"github.com/machinebus/machinebus/mcm/machineset"
)

// A brokenCache is one that cannot be read, for that reason.
type brokenCache struct {
	client.Reader

	err error
}

func (c brokenCache) List(context.Context, client.ObjectList, ...client.ListOption) error {
	return c.err
}

func names(t *testing.T, registry prometheus.Gatherer) (all []string) {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		all = append(all, f.GetName())
	}

	return all
}

// Replicas that stand by would have each machine counted twice.
func TestWhileLeading(t *testing.T) {
	t.Parallel()
	elected := make(chan struct{})
	registry := prometheus.NewPedanticRegistry()
	for _, c := range []prometheus.Collector{
		machine.NewInventory(t.Context(), brokenCache{}),
		machineset.NewInventory(t.Context(), brokenCache{}),
		machinedeployment.NewInventory(t.Context(), brokenCache{}),
	} {
		registry.MustRegister(whileLeading{c, elected})
	}
	if got := names(t, registry); len(got) != 0 {
		t.Errorf("a standby replica exports %v", got)
	}
	close(elected)
	want := []string{"mcm_machine_deployment_items_total", "mcm_machine_items_total", "mcm_machine_set_items_total"}
	if diff := cmp.Diff(want, names(t, registry)); diff != "" {
		t.Errorf("metrics of the leader (-want +got):\n%s", diff)
	}
}

// TestCounted shares its counters with nothing that runs.
func TestCounted(t *testing.T) {
	scrapeFailures.Reset()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(scrapeFailures)
	for kind, err := range map[string]error{
		"Machine-count": errors.New("the API server is away"), "Machineset-count": nil,
		"Machinedeployment-count": fmt.Errorf("list: %w", &cache.ErrCacheNotStarted{}),
	} {
		if got := counted(brokenCache{err: err}, kind).List(t.Context(), &v1alpha1.MachineList{}); !errors.Is(got, err) {
			t.Errorf("%s: error is %v, want %v", kind, got, err)
		}
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, m := range families[0].GetMetric() {
		got[m.GetLabel()[0].GetValue()+" "+m.GetLabel()[1].GetValue()] = m.GetCounter().GetValue()
	}
	want := map[string]float64{
		"machine-controller-manager-provider Machine-count": 1, "machine-controller-manager Machineset-count": 0,
		"machine-controller-manager Machinedeployment-count": 0,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("failures of %s (-want +got):\n%s", families[0].GetName(), diff)
	}
}
