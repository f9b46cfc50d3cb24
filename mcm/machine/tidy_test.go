package machine

import (
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestTidyMetrics holds names and helps against Prometheus's rules, except where the
// machine controller manager has chosen them.
func TestTidyMetrics(t *testing.T) {
	t.Parallel()
	inherited := []string{"mcm_machine_items_total", "mcm_machine_info", "mcm_machine_num_failed_join"}
	r := &Reconciler{}
	r.timings.failedToJoin(machineKind{})
	for _, s := range []stage{stageCreate, stageInitialize, stageJoin, stageDelete} {
		r.timings.observe(machineKind{}, s, -time.Second) // clocks differ
	}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(r.Collectors()...)
	registry.MustRegister(NewInventory(t.Context(), shelf{machines: make([]v1alpha1.Machine, 1)}))
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		if !slices.Contains(inherited, p.Metric) {
			t.Errorf("metric %s: %s", p.Metric, p.Text)
		}
	}
	for _, f := range families {
		if sum := f.GetMetric()[0].GetHistogram().GetSampleSum(); sum < 0 {
			t.Errorf("%s has a negative time: %v s", f.GetName(), sum)
		}
	}
}
