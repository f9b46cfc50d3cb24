package dispatch_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// ownedBy makes a machine one of a set.
func ownedBy(set string, machine *v1alpha1.Machine) *v1alpha1.Machine {
	machine.OwnerReferences = []metav1.OwnerReference{{Kind: "MachineSet", Name: set, Controller: new(true)}}

	return machine
}

// one lets one operation end after the other, in the order in which they come.
func one(order chan<- string) replica.HandlerFunc {
	return func(_ context.Context, t *replica.Task) *driverv1.Result {
		order <- bus.Verb(t.Operation) + " " + bus.MachineOf(t.Request).GetName()

		return created(t)
	}
}

func TestLimitIsReported(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.Limit(dispatch.Limits{Provider: dispatch.Limit{InFlight: 1}})
	r.Patient(time.Millisecond)
	g := newGate(t)
	r.replica(t, g.handle)
	first, second := newMachine("m1"), newMachine("m2")
	r.Start(operation(dispatch.Create, first, 0))
	bustest.Receive(t, "the driver to get the first create", g.entered)
	r.Start(operation(dispatch.Create, second, 0))
	r.noticed(t, second)
	s, _ := r.State(second.UID)
	if s.Phase != dispatch.Waiting || !s.Waited || s.Attempt != 0 {
		t.Errorf("second create is %+v, want it to wait", s)
	}
	contains(t, s.Reason, "--provider-max-in-flight")
	if len(g.entered) != 0 {
		t.Fatal("the driver got what the limit forbids")
	}
	r.Start(operation(dispatch.Delete, newMachine("m3"), 0))
	if got := bustest.Receive(t, "the driver to get the delete", g.entered); got.Operation != driverv1.Operation_OPERATION_DELETE {
		t.Errorf("the driver got %v, want the delete, which creates do not delay", got.Operation)
	}
	g.release()
	for _, m := range []*v1alpha1.Machine{first, second} {
		if s := r.until(t, m.UID, dispatch.Done); s.Err != nil {
			t.Errorf("create of %s: %v", m.Name, s.Err)
		}
	}
}

func TestCancelInQueue(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.Limit(dispatch.Limits{Provider: dispatch.Limit{InFlight: 1}})
	g := newGate(t)
	r.replica(t, g.handle)
	r.Start(operation(dispatch.Create, newMachine("m1"), 0))
	bustest.Receive(t, "the driver to get the first create", g.entered)
	op := operation(dispatch.Create, newMachine("m2"), 0)
	r.Start(op)
	if err := r.Cancel(op.Machine.UID, op.ID()); err != nil {
		t.Fatal(err)
	}
	s := r.until(t, op.Machine.UID, dispatch.Done)
	if dispatch.CodeOf(s.Err) != dispatch.Canceled || s.Attempt != 0 {
		t.Errorf("cancelled operation is %+v, want Canceled and no attempt", s)
	}
	g.release()
	r.until(t, "m1-uid", dispatch.Done)
	if len(g.entered) != 0 {
		t.Error("the driver got the cancelled create")
	}
}

// Of what another manager has journaled, that which a driver has goes on at once,
// whatever limits say. The rest was waiting, or has lost its replica: it takes its turn,
// ahead of what comes now.
func TestTakenUp(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	runs, g := make(chan string, 9), newGate(t)
	r.replica(t, func(ctx context.Context, task *replica.Task) *driverv1.Result {
		runs <- bus.MachineOf(task.Request).GetName()

		return g.handle(ctx, task)
	})
	for _, name := range []string{"m1", "m2"} {
		r.Start(operation(dispatch.Create, newMachine(name), 0))
		bustest.Receive(t, "the driver to get a create", runs)
	}
	r.stop()

	next := r.newManager(t)
	next.Limit(dispatch.Limits{Provider: dispatch.Limit{InFlight: 1}})
	next.Patient(time.Millisecond)
	takeUp := func(name string) {
		op := operation(dispatch.Create, newMachine(name), 0)
		op.Recover, op.Attempt = true, 1
		next.Start(op)
	}
	for _, name := range []string{"m1", "m2"} {
		takeUp(name)
		next.until(t, types.UID(name+"-uid"), dispatch.Running)
	}
	waits := func(name string) {
		bustest.Eventually(t, "the limit as the reason to wait", func() bool {
			s, _ := next.State(types.UID(name + "-uid"))

			return strings.Contains(s.Reason, "--provider-max-in-flight")
		})
	}
	next.Start(operation(dispatch.Create, newMachine("new"), 0))
	waits("new")
	takeUp("m3")
	waits("m3")
	if len(runs) > 0 {
		t.Errorf("the driver got %s beside what runs, which is more than the limit allows already", <-runs)
	}
	g.release()
	for _, want := range []string{"m3", "new"} {
		if got := bustest.Receive(t, "the driver to get the next create", runs); got != want {
			t.Errorf("the driver got %s, want %s", got, want)
		}
	}
	for _, name := range []string{"m1", "m2", "m3", "new"} {
		if s := next.until(t, types.UID(name+"-uid"), dispatch.Done); s.Err != nil {
			t.Errorf("%s: %v", name, s.Err)
		}
	}
}

// A resumed operation without room goes back to the queue, and is not sent again and
// again.
func TestLostWithoutRoom(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	full := newGate(t)
	r.replica(t, full.handle, func(c *replica.Config) { c.Slots = 1 })
	r.Start(operation(dispatch.Create, newMachine("filler"), 0))
	bustest.Receive(t, "the driver to get a create", full.entered)
	op := operation(dispatch.Create, newMachine("lost"), 0)
	op.Recover, op.Attempt = true, 1
	r.Start(op)
	r.waits(t, "lost", "has room")
	if s, _ := r.State("lost-uid"); s.Attempt != 1 {
		t.Errorf("state = %+v, want the attempt that there was not to be forgotten", s)
	}
	bustest.Eventually(t, "its place in the queue", func() bool { return r.Queued("lost-uid") })
	full.release()
	if s := r.until(t, "lost-uid", dispatch.Done); s.Err != nil || s.Attempt != 2 {
		t.Errorf("state = %+v, want success of attempt 2", s)
	}
}

// All slots hang in creates: a delete reaches the driver all the same.
func TestDeleteBesideHungCreates(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	g, deleted := newGate(t), make(chan string, 1)
	rep := r.replica(t, func(ctx context.Context, task *replica.Task) *driverv1.Result {
		if task.Operation == driverv1.Operation_OPERATION_DELETE {
			return one(deleted)(ctx, task)
		}

		return g.handle(ctx, task)
	}, func(c *replica.Config) { c.Slots = 2 })
	for _, name := range []string{"m1", "m2", "m3", "m4"} {
		r.Start(operation(dispatch.Create, newMachine(name), 0))
	}
	for range 2 {
		bustest.Receive(t, "the driver to get a create", g.entered)
	}
	bustest.Eventually(t, "session that says so", func() bool { return r.session(rep).GetRunning() == 2 })
	bustest.Eventually(t, "creates that wait", func() bool { return len(r.Waiting().GetOperations()) == 2 })
	r.Start(operation(dispatch.Delete, newMachine("old"), 0))
	bustest.Receive(t, "the driver to get the delete", deleted)
}

// One deployment has far more machines than the driver has slots: another one's
// machines, and deletes, come in between.
func TestNoisyDeployment(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	order, g := make(chan string, 100), newGate(t)
	rep := r.replica(t, func(ctx context.Context, task *replica.Task) *driverv1.Result {
		if bus.MachineOf(task.Request).GetName() == "blocker" {
			return g.handle(ctx, task)
		}

		return one(order)(ctx, task)
	}, func(c *replica.Config) { c.Slots = 1 })
	r.Start(operation(dispatch.Create, newMachine("blocker"), 0))
	bustest.Receive(t, "the driver to get the first create", g.entered)
	bustest.Eventually(t, "session that says so", func() bool { return r.session(rep).GetRunning() == 1 })
	const noisy = 20
	for i := range noisy {
		r.Start(operation(dispatch.Create, ownedBy("noisy", newMachine(fmt.Sprintf("noisy-%d", i))), 0))
	}
	r.until(t, "noisy-0-uid", dispatch.Waiting)
	r.waits(t, "noisy-0", "busy")
	r.Start(operation(dispatch.Create, ownedBy("quiet", newMachine("quiet")), 0))
	r.Start(operation(dispatch.Delete, newMachine("old"), 0))
	g.release()
	place := map[string]int{}
	for i := range noisy + 2 {
		place[bustest.Receive(t, "the driver to get the next operation", order)] = i
	}
	const soon = 6 // a few were on their way before the others came
	for _, name := range []string{"create quiet", "delete old"} {
		if place[name] > soon {
			t.Errorf("%s came as number %d of %d, want it to take turns with the noisy deployment", name, place[name]+1, noisy+2)
		}
	}
}
