package autoscaler_test

import (
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/machinebus/machinebus/bus/bustest"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

// An operator sees that a driver tells of its groups, but no more what is in one.
func TestProvidedMetrics(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	var mu sync.Mutex
	clock := now
	f.gateway(func() time.Time {
		mu.Lock()
		defer mu.Unlock()

		return clock
	})
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(f.provided)
	metrics := func() map[string]float64 {
		t.Helper()
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		problems, err := promlint.NewWithMetricFamilies(families).Lint()
		if err != nil || len(problems) > 0 {
			t.Fatal(err, problems)
		}
		got := map[string]float64{}
		for _, family := range families {
			for _, m := range family.GetMetric() {
				key := family.GetName()
				for _, l := range m.GetLabel() {
					key += " " + l.GetName() + "=" + l.GetValue()
				}
				got[key] = m.GetGauge().GetValue()
			}
		}

		return got
	}
	show := func(what string, instancesAge float64) {
		t.Helper()
		want := map[string]float64{
			"mcm_autoscaler_provider_node_groups provider=acme":                                         1,
			"mcm_autoscaler_provider_answer_age_seconds provider=acme":                                  0,
			"mcm_autoscaler_provider_instances_age_seconds node_group=provider:acme/pool provider=acme": instancesAge,
		}
		bustest.Eventually(t, what+" is shown", func() bool { return cmp.Equal(want, metrics()) })
	}
	show("what is new", 0)
	fail := func(req *nodegroupv1.Envelope) *nodegroupv1.Envelope {
		if req.GetInstances() == nil {
			return nil
		}

		return failed(driverv1.Code_CODE_INTERNAL)
	}
	f.change(func() { f.wrong = fail })
	mu.Lock()
	clock = clock.Add(90 * time.Second)
	mu.Unlock()
	show("the age of what is old", 90)
	f.change(func() { f.wrong = nil })
	show("what is new again", 0)
}
