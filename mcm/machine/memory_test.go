package machine_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// failureWith is a driver's answer with a code and what it wants to be told again.
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

// An asked is what a driver was told with an operation.
type asked struct {
	Op    driverv1.Operation
	State string // status.lastKnownState of the machine
}

// history returns what the driver was told with the mutations that came.
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

// What a driver remembers of a machine is told to it again, through failures too,
// and to none of another provider.
func TestStateBelongsToItsProvider(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.settings.Retry.Short, r.settings.Retry.Medium = time.Hour, time.Hour // a change of the class ends the wait
	r.cloud.failOnce(create, func(*driverv1.Machine) *driverv1.Result {
		return failureWith(driverv1.Code_CODE_UNAVAILABLE, create, "half made")
	})
	other := newCloud()
	other.failOnce(create, func(*driverv1.Machine) *driverv1.Result { return failure(driverv1.Code_CODE_INVALID_ARGUMENT) })
	r.startDriver(t)
	r.startDriverOf(t, "other", other, r.nats.URL())
	r.startManager(t)
	m := r.machine("a")
	r.create(t, m)
	r.event(t, m, "FailedCreate", "failed with Unavailable")
	class := r.class()
	r.change(t, class, func() { class.Provider = "other" })
	r.event(t, m, "FailedCreate", "failed with InvalidArgument")
	r.stop() // the next manager knows nothing but what is stored
	r.startManager(t)
	r.change(t, class, func() { class.Provider = provider })
	r.phase(t, m, v1alpha1.MachinePending)
	r.delete(t, m)
	r.gone(t, m)
	for who, c := range map[string]struct {
		cloud *cloud
		want  []asked
	}{
		provider: {r.cloud, []asked{{create, ""}, {create, "half made"}, {initialize, "made"}, {remove, "made"}}},
		"other":  {other, []asked{{create, ""}}},
	} {
		if diff := cmp.Diff(c.want, c.cloud.history()); diff != "" {
			t.Errorf("what the driver of %s was told (-want +got):\n%s", who, diff)
		}
	}
}

// A create that ends when the machine is on its way out says what its delete may
// need.
func TestStateOfACancelledCreate(t *testing.T) {
	t.Parallel()
	r := newRunningRig(t)
	r.cloud.answer(func(ctx context.Context, task *bus.Task) *driverv1.Result {
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
		t.Errorf("what the driver was told (-want +got):\n%s", diff)
	}
}
