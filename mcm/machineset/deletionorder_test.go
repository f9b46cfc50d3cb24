package machineset

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// noon is the time of all tests of pure functions.
var noon = time.Date(2026, 8, 11, 12, 0, 0, 0, time.UTC)

// A change makes a machine differ from the usual one.
type change func(*v1alpha1.Machine)

// newMachine returns a Running machine made an hour ago.
func newMachine(name string, changes ...change) *v1alpha1.Machine {
	m := &v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{
		Name: name, UID: types.UID(name), CreationTimestamp: metav1.NewTime(noon.Add(-time.Hour)),
		Labels: map[string]string{"pool": "a"}, Annotations: map[string]string{},
	}}
	m.Status.CurrentStatus.Phase = v1alpha1.MachineRunning
	for _, c := range changes {
		c(m)
	}

	return m
}

func phase(phase v1alpha1.MachinePhase) change {
	return func(m *v1alpha1.Machine) { m.Status.CurrentStatus.Phase = phase }
}

func annotated(key, value string) change {
	return func(m *v1alpha1.Machine) { m.Annotations[key] = value }
}

func aged(age time.Duration) change {
	return func(m *v1alpha1.Machine) { m.CreationTimestamp = metav1.NewTime(noon.Add(-age)) }
}

func preservedFor(d time.Duration) change {
	return func(m *v1alpha1.Machine) { m.Status.CurrentStatus.PreserveExpiryTime = &metav1.Time{Time: noon.Add(d)} }
}

// onNode says what the machine's Node says of its preservation.
func onNode(value string) change {
	return annotated(v1alpha1.AnnotationKeyLastAppliedNodePreserveValue, value)
}

// preserves has a set preserve that many Failed machines.
func preserves(most int32) func(*v1alpha1.MachineSet) {
	return func(set *v1alpha1.MachineSet) { set.Spec.AutoPreserveFailedMachineMax = &most }
}

func markedFor(d time.Duration) change {
	return annotated(v1alpha1.AnnotationKeyMarkedForDeletionTime, noon.Add(d).Format(time.RFC3339))
}

func withPriority(text string) change { return annotated(v1alpha1.AnnotationKeyMachinePriority, text) }

// TestOrder has the machines in the order in which they are to be deleted; each
// says what puts it before the next.
func TestOrder(t *testing.T) {
	t.Parallel()
	want := []*v1alpha1.Machine{
		newMachine("priority -1", withPriority("-1")),
		newMachine("priority 1, marked at 10", withPriority("1"), markedFor(-2*time.Hour)),
		newMachine("priority 1, marked at 11", withPriority("1"), markedFor(-time.Hour)),
		newMachine("priority 1, Failed", withPriority("1"), phase(v1alpha1.MachineFailed)),
		newMachine("priority 1, Running", withPriority("1")),
		newMachine("priority 2", withPriority("2")),
		newMachine("marked, no priority", markedFor(-time.Hour), aged(time.Second)),
		newMachine("in place", phase(v1alpha1.MachineInPlaceUpdating), aged(4*time.Hour)),
		newMachine("new", phase(v1alpha1.MachinePhaseNew), aged(3*time.Hour)),
		newMachine("unheard of", phase("Dancing"), aged(2*time.Hour)),
		newMachine("Terminating", phase(v1alpha1.MachineTerminating)),
		newMachine("Failed", phase(v1alpha1.MachineFailed)),
		newMachine("CrashLoopBackOff", phase(v1alpha1.MachineCrashLoopBackOff)),
		newMachine("Unknown", phase(v1alpha1.MachineUnknown)),
		newMachine("Pending", phase(v1alpha1.MachinePending)),
		newMachine("Available", phase(v1alpha1.MachineAvailable)),
		newMachine("Running, oldest", aged(5*time.Hour), withPriority("three")),
		newMachine("Running, 2 hours", aged(2*time.Hour), withPriority("3")),
		newMachine("Running, name a"),
		newMachine("Running, name b"),
		newMachine("priority 4", withPriority("4"), aged(9*time.Hour)),
		newMachine("preserved once", preservedFor(-time.Minute), withPriority("5")),
		newMachine("auto-preserved", preservedFor(3*time.Hour), annotated(v1alpha1.AnnotationKeyPreserve, "auto-preserved")),
		newMachine("preserved for 1 hour", preservedFor(time.Hour), annotated(v1alpha1.AnnotationKeyPreserve, "now")),
		newMachine("preserved for 2 hours", preservedFor(2*time.Hour), withPriority("1"), phase(v1alpha1.MachineFailed)),
		newMachine("preserved for 2 hours too", preservedFor(2*time.Hour)),
		newMachine("about to be preserved", phase(v1alpha1.MachineFailed), onNode("when-failed")),
	}
	got := slices.Clone(want)
	slices.Reverse(got)
	slices.SortFunc(got, func(a, b *v1alpha1.Machine) int { return deletedBefore(a, b, noon) })
	if diff := cmp.Diff(namesOf(want), namesOf(got)); diff != "" {
		t.Errorf("order of deletion (-want +got):\n%s", diff)
	}
}

func namesOf(machines []*v1alpha1.Machine) []string {
	names := make([]string, 0, len(machines))
	for _, m := range machines {
		names = append(names, m.Name)
	}

	return names
}

// drawMachine draws a machine of few differences, so that they meet.
func drawMachine(t *rapid.T, name string) *v1alpha1.Machine {
	phases := []v1alpha1.MachinePhase{
		"", "Pending", "Available", "Running", "Unknown", "Failed", "CrashLoopBackOff", "Terminating", "InPlaceUpdating",
	}
	m := newMachine(name,
		phase(rapid.SampledFrom(phases).Draw(t, "phase")),
		aged(time.Duration(rapid.IntRange(0, 2).Draw(t, "age"))*time.Second),
		withPriority(rapid.SampledFrom([]string{"", "1", "3", "x"}).Draw(t, "priority")))
	changes := map[string]change{
		"marked early": markedFor(-2 * time.Minute), "marked late": markedFor(2 * time.Minute),
		"preserved": preservedFor(time.Hour), "expired": preservedFor(-time.Hour),
		"auto":    annotated(v1alpha1.AnnotationKeyPreserve, v1alpha1.PreserveAuto),
		"on Node": onNode(v1alpha1.PreserveAuto),
		"deleted": func(m *v1alpha1.Machine) { m.DeletionTimestamp = &metav1.Time{Time: noon} },
		"updated": func(m *v1alpha1.Machine) { m.Labels[v1alpha1.LabelKeyNodeUpdateResult] = "successful" },
	}
	for _, what := range slices.Sorted(maps.Keys(changes)) { // in one order, or no failure could be reproduced
		if rapid.IntRange(0, 4).Draw(t, what) == 0 {
			changes[what](m)
		}
	}

	return m
}

func drawMachines(t *rapid.T, most int) []*v1alpha1.Machine {
	var machines []*v1alpha1.Machine
	for i := range rapid.IntRange(0, most).Draw(t, "machines") {
		machines = append(machines, drawMachine(t, fmt.Sprintf("m%03d", i)))
	}

	return machines
}

// An order that contradicts itself would delete another machine at each look.
func TestOrderIsOne(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		a, b, c := drawMachine(t, "a"), drawMachine(t, "b"), drawMachine(t, "c")
		ab, ba := deletedBefore(a, b, noon), deletedBefore(b, a, noon)
		bc, ac := deletedBefore(b, c, noon), deletedBefore(a, c, noon)
		if ab == 0 || ab*ba >= 0 {
			t.Fatalf("a to b is %d, b to a is %d", ab, ba)
		}
		if ab < 0 && bc < 0 && ac >= 0 {
			t.Fatalf("a before b before c, but a to c is %d", ac)
		}
	})
}
