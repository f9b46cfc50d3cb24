package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestEvents reads what `kubectl get events` shows of a machine, in its order.
func TestEvents(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("", "--retry-short=1s")
	e.startDrivers(1, manager.NATSURL, tap)
	e.createClass()
	good, bad := e.name+"-good", e.name+"-bad"
	e.createMachine(good, className)
	e.waitRunning(good)
	e.createPod(good)
	e.deleteAll(good)
	e.wantStory(good, "it came and went",
		"Normal Created", "Normal Joined", "Normal Terminating", "Normal Draining", "Normal Drained", "Normal InstanceDeleted", "Normal Deleted")

	faults := []cloudapi.Fault{{Operation: cloudapi.OpCreate, Name: bad, Next: 1, Status: 503, Code: cloudapi.CodeUnavailable, Message: "no power in the rack"}}
	_, err := e.cloud.Admin.Patch(e.ctx(), cloudapi.KnobsPatch{Faults: &faults})
	e.must(err)
	e.refuseNodes(bad)
	m := e.newMachine(bad, className)
	m.Spec.MachineCreationTimeout = &metav1.Duration{Duration: 3 * time.Second}
	e.must(e.kube.Create(e.ctx(), m))
	e.waitEvent(bad, "Warning", "no power in the rack")
	e.waitEvent(bad, "Warning", "failed to join")
	e.waitPhase(v1alpha1.MachineFailed, []string{bad})
	e.deleteAll(bad)
	e.wantStory(bad, "it failed to be made, then to join, and went",
		"Warning FailedCreate", "Normal Created", "Warning FailedToJoin", "Normal Terminating", "Normal InstanceDeleted", "Normal Deleted")
}

// TestEventsThatAreSaidOnce reads what is said of a machine after so many failures
// that no more is said of those.
func TestEventsThatAreSaidOnce(t *testing.T) {
	e := newEnv(t)
	manager, tap := e.startManager("", "--retry-short=20ms")
	e.startDrivers(1, manager.NATSURL, tap)
	e.createClass()
	faults := []cloudapi.Fault{{Operation: cloudapi.OpCreate, Status: 503, Code: cloudapi.CodeUnavailable, Message: "no power in the rack"}}
	_, err := e.cloud.Admin.Patch(e.ctx(), cloudapi.KnobsPatch{Faults: &faults})
	e.must(err)
	name := e.createMachines(1, className)[0]
	const failures = 30
	e.eventually("its creation has failed often", func(context.Context) error {
		if n := len(tap.Audits()); n < failures {
			return fmt.Errorf("only %d times", n)
		}

		return nil
	})

	class := e.newClass(className, nil)
	e.must(e.kube.Get(e.ctx(), client.ObjectKeyFromObject(class), class))
	provider := class.Provider
	setProvider := func(to string) {
		e.must(e.kube.Patch(e.ctx(), class, client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"provider":%q}`, to))))
	}
	setProvider("")
	e.waitReason(name, "InvalidMachine")
	e.deleteMachine(name)
	e.waitReason(name, "CannotDelete")
	setProvider(provider)
	e.waitGone(name)
}

// waitReason waits for a machine's Event for a reason.
func (e *env) waitReason(machine, reason string) {
	e.Helper()
	e.eventually("machine "+machine+" has the Event "+reason, func(ctx context.Context) error {
		events, err := e.events(ctx, machine)
		if err == nil && !slices.ContainsFunc(events, func(event corev1.Event) bool { return event.Reason == reason }) {
			err = fmt.Errorf("it is none of its %d", len(events))
		}

		return err
	})
}

// wantStory expects a machine's Events, as type and reason.
func (e *env) wantStory(machine, story string, want ...string) {
	e.Helper()
	e.waitEvent(machine, "Normal", "Machine, instance and node are gone")
	events, err := e.events(e.ctx(), machine) // in the order of names, which end in the time
	e.must(err)
	var got, text []string
	for i := range events {
		got = append(got, events[i].Type+" "+events[i].Reason)
		text = append(text, fmt.Sprintf("%s: %s", events[i].Reason, events[i].Message))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		e.Errorf("%s (-want +got):\n%s\n%s", story, diff, strings.Join(text, "\n"))
	}
}
