package machine_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// typedMachine returns a machine of the MachineDeployment "workers" in the zone "north",
// whose class is of the type "m5".
func (r *rig) typedMachine(t *testing.T, name string) *v1alpha1.Machine {
	t.Helper()
	class := r.class()
	class.Name = "typed"
	class.NodeTemplate = &v1alpha1.NodeTemplate{
		Capacity:     corev1.ResourceList{"cpu": resource.MustParse("1"), "memory": resource.MustParse("1Gi"), "gpu": resource.MustParse("0")},
		InstanceType: "m5", Region: "r", Zone: "of the class",
	}
	r.create(t, class)
	m := r.machine(name)
	m.Labels = map[string]string{v1alpha1.LabelKeyMachineDeployment: "workers"}
	m.Spec.Class.Name = class.Name
	m.Spec.NodeTemplateSpec.Labels = map[string]string{corev1.LabelTopologyZone: "north"}

	return m
}

// figures returns how often each stage was timed, and what the metrics of the
// machine controller manager's names say, with "+" for any time above zero.
func (r *rig) figures(t *testing.T) map[string]string {
	t.Helper()
	families, err := r.metrics.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			key := strings.TrimPrefix(f.GetName(), "mcm_machine_")
			for _, l := range m.GetLabel() {
				key += " " + l.GetValue()
			}
			key = strings.ReplaceAll(key, r.namespace, "NS")
			switch {
			case strings.HasPrefix(key, "stage_duration_seconds"):
				got[key] = fmt.Sprint(m.GetHistogram().GetSampleCount())
			case m.GetCounter() != nil:
				got[key] = fmt.Sprint(m.GetCounter().GetValue())
			case strings.HasSuffix(f.GetName(), "_duration_seconds") && m.GetGauge().GetValue() > 0:
				got[key] = "+"
			}
		}
	}

	return got
}

func TestTimings(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.now = func() time.Time { return time.Now().Add(time.Minute) } // later than what the API server stores in whole seconds
	r.startDriver(t)
	r.startManager(t)
	m := r.typedMachine(t, "a")
	r.create(t, m)
	r.join(t, m)
	r.phase(t, m, v1alpha1.MachineRunning)
	r.delete(t, m)
	r.gone(t, m)
	// Labels are in the alphabet's order: instance_type, machine_deployment, namespace, zone or stage.
	want := map[string]string{
		"create_duration_seconds m5 workers NS north":     "+",
		"initialize_duration_seconds m5 workers NS north": "+",
		"join_duration_seconds m5 workers NS north":       "+",
		"delete_duration_seconds m5 workers NS north":     "+",
		"stage_duration_seconds workers NS create":        "1",
		"stage_duration_seconds workers NS initialize":    "1",
		"stage_duration_seconds workers NS join":          "1",
		"stage_duration_seconds workers NS delete":        "1",
	}
	bustest.Eventually(t, "all stages are timed", func() bool { return len(r.figures(t)) >= len(want) })
	if diff := cmp.Diff(want, r.figures(t)); diff != "" {
		t.Errorf("figures (-want +got):\n%s", diff)
	}
}

// A machine may have no MachineDeployment, a class may say nothing of its nodes,
// and a driver may know of no initialization; none of that must get in the way.
func TestTimings_Bare(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cloud.noInitialize = true
	r.now = func() time.Time { return time.Now().Add(time.Minute) }
	r.startDriver(t)
	r.startManager(t)
	m := r.machine("a")
	r.create(t, m)
	r.phase(t, m, v1alpha1.MachinePending)
	want := map[string]string{"create_duration_seconds   NS ": "+", "stage_duration_seconds  NS create": "1"}
	if diff := cmp.Diff(want, r.figures(t)); diff != "" {
		t.Errorf("figures (-want +got):\n%s", diff)
	}
}

func TestTimings_FailedJoin(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.startDriver(t)
	r.startManager(t)
	m := r.typedMachine(t, "a")
	m.Annotations = map[string]string{v1alpha1.AnnotationKeyEffectiveCreationTimeout: "1ms"}
	r.create(t, m)
	r.phase(t, m, v1alpha1.MachineFailed)
	const failed = "num_failed_join m5 workers NS north"
	bustest.Eventually(t, "the failure counts", func() bool { return r.figures(t)[failed] == "1" })
	// Another look at it is no other failure.
	r.join(t, m)
	r.phase(t, m, v1alpha1.MachineRunning)
	if got := r.figures(t)[failed]; got != "1" {
		t.Errorf("%s failures, want 1", got)
	}
}
