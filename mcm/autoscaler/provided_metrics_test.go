package autoscaler_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/mcm/autoscaler"
	"github.com/machinebus/machinebus/mcm/dispatch"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
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
	fail := func(req *driverv1.NodeGroupsRequest) *driverv1.Result {
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

// A leaving source has one group of each of its providers.
type leaving struct {
	autoscaler.GroupSource

	mu        sync.Mutex
	providers []string
}

func (l *leaving) Providers() []string {
	l.mu.Lock()
	defer l.mu.Unlock()

	return l.providers
}

func (*leaving) Groups(context.Context, string) ([]dispatch.NodeGroup, error) {
	return []dispatch.NodeGroup{{ID: "pool", Max: 1}}, nil
}

func (*leaving) Instances(context.Context, string, string) ([]dispatch.NodeGroupInstance, error) {
	return nil, nil
}

// What is shown of a provider that has left would grow older for ever.
func TestProvidedMetrics_Left(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		source := &leaving{providers: []string{"acme", "zoo"}}
		provided := autoscaler.NewProvided(source, nil)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- provided.Start(ctx) }()
		for _, tc := range []struct {
			providers []string
			want      int
		}{{source.providers, 6}, {[]string{"zoo"}, 3}, {nil, 0}, {source.providers, 6}} {
			source.mu.Lock()
			source.providers = tc.providers
			source.mu.Unlock()
			<-time.After(20 * time.Second) // of the bubble's clock
			metrics := make(chan prometheus.Metric, 100)
			provided.Collect(metrics)
			if got := len(metrics); got != tc.want {
				t.Errorf("%d metrics of providers %v, want %d", got, tc.providers, tc.want)
			}
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
