package machine_test

import (
	"cmp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// story waits until the machine's Events, in the order in which they were first
// recorded, begin with the words given, each type and reason, and returns them as
// `kubectl get events` shows them.
func (r *rig) story(t *testing.T, m *v1alpha1.Machine, want ...string) string {
	t.Helper()
	var reasons []string
	var lines []string
	if !poll(t, func() bool {
		list := &corev1.EventList{}
		if err := r.List(t.Context(), list, client.InNamespace(r.namespace)); err != nil {
			t.Fatal(err)
		}
		mine := slices.DeleteFunc(list.Items, func(e corev1.Event) bool { return e.InvolvedObject.UID != m.UID })
		// Timestamps are whole seconds; an Event's name ends with the nanosecond.
		slices.SortFunc(mine, func(a, b corev1.Event) int {
			return cmp.Compare(a.Name[strings.LastIndex(a.Name, ".")+1:], b.Name[strings.LastIndex(b.Name, ".")+1:])
		})
		reasons, lines = nil, nil
		for i := range mine {
			reasons = append(reasons, mine[i].Type+" "+mine[i].Reason)
			lines = append(lines, mine[i].Type+" "+mine[i].Reason+" "+mine[i].Message)
		}

		return slices.Equal(reasons, want)
	}) {
		t.Fatalf("events are\n%s\nwant\n%s", strings.Join(lines, "\n"), strings.Join(want, "\n"))
	}

	return strings.Join(lines, "\n")
}

// wantParts requires that a story contains what an operator has to know.
func wantParts(t *testing.T, story string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(story, part) {
			t.Errorf("events do not say %q:\n%s", part, story)
		}
	}
}

// Events alone must show what happened to a machine, from its first word to its
// last.
func TestEventsOfASuccessfulMachine(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	m := r.machine("a")
	r.create(t, m)
	node := r.join(t, m)
	r.phase(t, m, v1alpha1.MachineRunning)
	r.condition(t, node, ready(corev1.ConditionFalse))
	r.phase(t, m, v1alpha1.MachineUnknown)
	r.condition(t, node, ready(corev1.ConditionTrue))
	r.phase(t, m, v1alpha1.MachineRunning)
	r.delete(t, m)
	r.gone(t, m)
	story := r.story(t, m, "Normal Created", "Normal Joined", "Warning Unhealthy", "Normal Rejoined",
		"Normal Terminating", "Normal Draining", "Normal Drained", "Normal InstanceDeleted", "Normal Deleted")
	wantParts(t, story, "Created instance virtual://"+m.Name, "driver replica", "as node "+m.Name, "Ready=False (Test)",
		"Evicts the pods of node "+m.Name, "Deleted instance virtual://"+m.Name)
}

func TestEventsOfAFailedMachine(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.settings.Retry.ResourceExhausted, r.settings.Retry.Short = 30*time.Millisecond, 20*time.Millisecond
	r.cloud.failOnce(create, func(*driverv1.Machine) *driverv1.Result { return failure(driverv1.Code_CODE_RESOURCE_EXHAUSTED) })
	r.startManager(t)
	m := r.machine("a")
	r.create(t, m)
	r.event(t, m, "OperationWaiting", "no driver for provider virtual")
	r.startDriver(t)
	r.phase(t, m, v1alpha1.MachinePending)
	r.change(t, m, func() { m.Spec.MachineCreationTimeout = &metav1.Duration{Duration: 60 * time.Millisecond} })
	r.phase(t, m, v1alpha1.MachineFailed)
	r.cloud.failOnce(remove, func(*driverv1.Machine) *driverv1.Result { return failure(driverv1.Code_CODE_UNAVAILABLE) })
	r.delete(t, m)
	r.gone(t, m)
	story := r.story(t, m, "Warning OperationWaiting", "Warning FailedCreate", "Normal Created", "Warning FailedToJoin",
		"Normal Terminating", "Warning FailedDelete", "Normal InstanceDeleted", "Normal Deleted")
	wantParts(t, story, "The create waits: no driver for provider virtual", "create failed with ResourceExhausted", "next try in 30ms: no luck",
		"failed to join the cluster in 0.001 minutes", "delete failed with Unavailable", "next try in 20ms: no luck")
}
