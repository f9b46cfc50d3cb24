package machine

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// A shelf is a cache with these machines.
type shelf struct {
	client.Reader

	machines []v1alpha1.Machine
}

func (s shelf) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	list.(*v1alpha1.MachineList).Items = s.machines

	return nil
}

// series gathers what is registered, as sorted lines.
func series(t *testing.T, registry prometheus.Gatherer) string {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			value := m.GetGauge().GetValue() + m.GetCounter().GetValue() + m.GetHistogram().GetSampleSum()
			fmt.Fprintf(&text, "%s{%s} %v\n", f.GetName(), strings.Join(labels, ","), value)
		}
	}

	return text.String()
}

func TestInventory(t *testing.T) {
	t.Parallel()
	m := v1alpha1.Machine{
		ObjectMeta: metav1.ObjectMeta{
			Name: "a", Namespace: "shop", CreationTimestamp: metav1.NewTime(time.Unix(1700000000, 0)),
			Labels: map[string]string{v1alpha1.LabelKeyNode: "node-a"},
		},
		Spec: v1alpha1.MachineSpec{
			ProviderID: "p:1", Class: v1alpha1.ClassSpec{APIGroup: "machine.sapcloud.io", Kind: v1alpha1.KindMachineClass, Name: "small"},
		},
		Status: v1alpha1.MachineStatus{
			CurrentStatus: v1alpha1.CurrentStatus{Phase: v1alpha1.MachineRunning},
			Conditions: []corev1.NodeCondition{
				{Type: "DiskPressure", Status: "False"},
				{Type: "Odd", Status: "Unknown"},
				{Type: "Ready", Status: "True"},
				{Type: "Ready", Status: "False"}, // as a person may have written it
			},
		},
	}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(NewInventory(t.Context(), shelf{machines: []v1alpha1.Machine{m}}))
	const want = `mcm_machine_current_status_phase{name="a",namespace="shop"} 1
mcm_machine_info{createdAt="1700000000",name="a",namespace="shop",node_name="node-a",spec_class_api_group="machine.sapcloud.io",spec_class_kind="MachineClass",spec_class_name="small",spec_provider_id="p:1"} 1
mcm_machine_items_total{} 1
mcm_machine_status_condition{condition="DiskPressure",name="a",namespace="shop"} 0
mcm_machine_status_condition{condition="Odd",name="a",namespace="shop"} 2
mcm_machine_status_condition{condition="Ready",name="a",namespace="shop"} 1
`
	if diff := cmp.Diff(want, series(t, registry)); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}

// TestPhaseNumbers has them as alerts made for the machine controller manager do.
func TestPhaseNumbers(t *testing.T) {
	t.Parallel()
	want := map[v1alpha1.MachinePhase]int{
		"Terminating": -4, "Failed": -3, "CrashLoopBackOff": -2, "Unknown": -1, "Pending": 0, "Running": 1,
		"": 0, "Available": 0, "InPlaceUpdating": 0, "InPlaceUpdateSuccessful": 0, "InPlaceUpdateFailed": 0,
	}
	var machines []v1alpha1.Machine
	for phase := range want {
		m := v1alpha1.Machine{}
		m.Name, m.Status.CurrentStatus.Phase = "in-"+string(phase), phase
		machines = append(machines, m)
	}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(NewInventory(t.Context(), shelf{machines: machines}))
	text := series(t, registry)
	for phase, number := range want {
		line := fmt.Sprintf("mcm_machine_current_status_phase{name=\"in-%s\",namespace=\"\"} %d\n", phase, number)
		if !strings.Contains(text, line) {
			t.Errorf("phase %q: no line %s", phase, line)
		}
	}
}

// BenchmarkInventory is a scrape of as many machines as one manager is meant for.
func BenchmarkInventory(b *testing.B) {
	machines := make([]v1alpha1.Machine, 10000)
	for i := range machines {
		machines[i].Name, machines[i].Namespace = fmt.Sprint("machine-", i), "shop"
		for _, c := range []corev1.NodeConditionType{"Ready", "DiskPressure", "MemoryPressure", "PIDPressure", "KernelDeadlock"} {
			machines[i].Status.Conditions = append(machines[i].Status.Conditions, corev1.NodeCondition{Type: c})
		}
	}
	inventory := NewInventory(b.Context(), shelf{machines: machines})
	b.ReportAllocs()
	for b.Loop() {
		ch := make(chan prometheus.Metric, 100)
		go func() {
			defer close(ch)
			inventory.Collect(ch)
		}()
		for range ch {
		}
	}
}
