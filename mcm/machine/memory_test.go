package machine_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// failureWith is a driver's answer with a code and the state that it wants back.
func failureWith(code driverv1.Code, op driverv1.Operation, state string) *driverv1.Result {
	result := failure(code)
	switch op {
	case create:
		result.Payload = &driverv1.Result_Create{Create: &driverv1.CreateResponse{LastKnownState: state}}
	case initialize:
		result.Payload = &driverv1.Result_Initialize{Initialize: &driverv1.InitializeResponse{LastKnownState: state}}
	default:
		result.Payload = &driverv1.Result_Delete{Delete: &driverv1.DeleteResponse{LastKnownState: state}}
	}

	return result
}

// An asked is what a driver got with an operation.
type asked struct {
	Op    driverv1.Operation
	State string // status.lastKnownState of the machine
}

// history returns what the driver got with its mutations.
func (c *cloud) history() []asked {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []asked
	for _, t := range c.tasks {
		if bus.Mutates(t.Operation) {
			all = append(all, asked{t.Operation, bus.MachineOf(t.Request).GetLastKnownState()})
		}
	}

	return all
}

// A driver gets its stored state of a machine again, also after failures.
func TestStateSurvivesFailures(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.settings.Retry.Short, r.settings.Retry.Medium = time.Hour, time.Hour // a change of the class ends the wait
	r.cloud.failOnce(create, func(*driverv1.Machine) *driverv1.Result {
		return failureWith(driverv1.Code_CODE_UNAVAILABLE, create, "half made")
	})
	r.startDriver(t)
	r.startManager(t)
	m := r.machine("a")
	r.create(t, m)
	r.event(t, m, "FailedCreate", "failed with Unavailable")
	r.stop() // the next manager knows nothing but what is stored
	r.startManager(t)
	class := r.class()
	r.change(t, class, func() { class.ProviderSpec.Raw = []byte(`{"size":"m"}`) })
	r.phase(t, m, v1alpha1.MachinePending)
	r.delete(t, m)
	r.gone(t, m)
	want := []asked{{create, ""}, {create, "half made"}, {initialize, "made"}, {remove, "made"}}
	if diff := cmp.Diff(want, r.cloud.history()); diff != "" {
		t.Errorf("what the driver got (-want +got):\n%s", diff)
	}
}

// The state stays after an instance was given back, for its driver and no other.
func TestStateBelongsToItsProvider(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	m := r.machine("a")
	m.Annotations = map[string]string{v1alpha1.AnnotationKeyOperation: `{"settled":2,"stateOf":"other"}`}
	r.create(t, m)
	m.Status.LastKnownState = "theirs"
	if err := r.Status().Update(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	r.startDriver(t)
	r.startManager(t)
	r.phase(t, m, v1alpha1.MachinePending)
	if diff := cmp.Diff([]asked{{create, ""}, {initialize, "made"}}, r.cloud.history()); diff != "" {
		t.Errorf("what the driver got (-want +got):\n%s", diff)
	}
}

// A create that ends when the machine is on its way out says what its delete may
// need.
func TestStateOfACancelledCreate(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	r.cloud.answer(func(ctx context.Context, task *replica.Task) *driverv1.Result {
		if task.Operation != create {
			return nil
		}
		r.cloud.entered <- task
		<-ctx.Done()

		return failureWith(driverv1.Code_CODE_CANCELED, create, "disk only")
	})
	m := r.machine("a")
	r.create(t, m)
	bustest.Receive(t, "the driver to get the create", r.cloud.entered)
	r.delete(t, m)
	r.gone(t, m)
	want := []asked{{create, ""}, {remove, "disk only"}}
	if diff := cmp.Diff(want, r.cloud.history()); diff != "" {
		t.Errorf("what the driver got (-want +got):\n%s", diff)
	}
}
