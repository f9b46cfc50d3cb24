package dispatch_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	corev1 "k8s.io/api/core/v1"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestCreate(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	audits := bustest.Raw(t, r.srv.URL())
	heard := make(chan *nats.Msg, 10)
	if _, err := audits.ChanSubscribe("mcm.v1.default.audit.>", heard); err != nil {
		t.Fatal(err)
	}
	if err := audits.Flush(); err != nil {
		t.Fatal(err)
	}
	g := newGate(t)
	rep := r.replica(t, g.handle)
	machine := newMachine("m1")
	op := operation(dispatch.Create, machine, 0)

	if s := r.Start(op); s.Phase != dispatch.Waiting || s.Reason != "" || s.ID != "m1-uid.create.0" {
		t.Errorf("first Start returned %+v, want one that waits for nothing known yet", s)
	}
	bustest.Receive(t, "the driver to get the create", g.entered)
	running := r.until(t, machine.UID, dispatch.Running)
	if running.Replica != rep.Replica() || running.Attempt != 1 || running.Waited {
		t.Errorf("running operation is %+v, want attempt 1 at %s", running, rep.Replica())
	}
	if s := r.Start(op); s.Phase != dispatch.Running {
		t.Errorf("second Start returned %+v, want the running operation", s)
	}
	if !r.InFlight(provider, op.ID(), machine.UID) {
		t.Error("the operation is not in flight for its provider")
	}
	for name, in := range map[string]bool{
		"other provider":  r.InFlight("other", op.ID(), machine.UID),
		"other operation": r.InFlight(provider, "m1-uid.create.1", machine.UID),
		"other machine":   r.InFlight(provider, op.ID(), "m2-uid"),
	} {
		if in {
			t.Errorf("in flight for %s", name)
		}
	}

	g.release()
	r.noticed(t, machine)
	done := r.Start(op)
	want := &dispatch.Instance{
		ProviderID: "virtual://m1", NodeName: "node-m1",
		Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}},
	}
	if diff := cmp.Diff(want, done.Instance); diff != "" {
		t.Errorf("instance (-want +got):\n%s", diff)
	}
	if done.Phase != dispatch.Done || done.Err != nil || !done.Stated || done.LastKnownState != "seen" {
		t.Errorf("done operation is %+v", done)
	}
	bustest.Eventually(t, "result kept by the replica", func() bool {
		ops := r.session(rep).GetOperations()

		return len(ops) == 1 && ops[0].GetSettled()
	})

	r.Settle(machine.UID, op.ID())
	bustest.Eventually(t, "result forgotten by the replica", func() bool { return len(r.session(rep).GetOperations()) == 0 })
	if s := r.Start(op); s.Phase != dispatch.Stale || s.Settled != 1 {
		t.Errorf("Start of a settled operation returned %+v, want stale, 1 settled", s)
	}
	if _, known := r.State(machine.UID); known || r.InFlight(provider, op.ID(), machine.UID) {
		t.Error("a settled operation is still known or in flight")
	}
	checkAudit(t, bustest.Receive(t, "audit message", heard), rep.Replica())
	if len(g.entered) != 0 {
		t.Error("the driver got the create again")
	}
}

func checkAudit(t *testing.T, m *nats.Msg, replicaID string) {
	t.Helper()
	if want := "mcm.v1.default.audit.virtual.create.shop.m1"; m.Subject != want {
		t.Errorf("audit subject is %s, want %s", m.Subject, want)
	}
	env, err := bus.Decode(m.Data, "")
	if err != nil {
		t.Fatal(err)
	}
	a := env.GetAudit()
	type facts struct {
		ID, Provider, Namespace, Name, Replica, ProviderID string
		Operation                                          driverv1.Operation
		Attempts                                           uint32
		Code                                               driverv1.Code
	}
	got := facts{
		a.GetOperationId(), a.GetProvider(), a.GetNamespace(), a.GetName(), a.GetReplica(), a.GetProviderId(),
		a.GetOperation(), a.GetAttempts(), a.GetStatus().GetCode(),
	}
	want := facts{
		"m1-uid.create.0", provider, "shop", "m1", replicaID, "virtual://m1",
		driverv1.Operation_OPERATION_CREATE, 1, driverv1.Code_CODE_OK,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("audit (-want +got):\n%s", diff)
	}
	if a.GetStartedAt().AsTime().IsZero() || a.GetTook().AsDuration() < 0 {
		t.Errorf("audit times are %v and %v", a.GetStartedAt(), a.GetTook())
	}
}

func TestOneOperationOfAMachineAtATime(t *testing.T) {
	t.Parallel()
	r, machine := newRig(t), newMachine("m1")
	g := newGate(t)
	rep := r.replica(t, g.handle)
	r.Start(operation(dispatch.Create, machine, 3))
	bustest.Receive(t, "the driver to get the create", g.entered)
	for name, c := range map[string]struct {
		reason string
		op     dispatch.Operation
		want   dispatch.Phase
		number int64
	}{
		"same number": {
			"only one of both can be what the journal says next", operation(dispatch.Delete, machine, 3), dispatch.Refused, 0,
		},
		"next number": {"the create has not ended", operation(dispatch.Delete, machine, 4), dispatch.Refused, 0},
		"old number":  {"three were settled before the create", operation(dispatch.Delete, machine, 2), dispatch.Stale, 3},
	} {
		if s := r.Start(c.op); s.Phase != c.want || s.Settled != c.number {
			t.Errorf("%s: Start returned %+v, want phase %v with %d settled: %s", name, s, c.want, c.number, c.reason)
		}
	}
	g.release()
	r.until(t, machine.UID, dispatch.Done)
	// A caller that asks for the next one has stored the outcome, or would not know
	// of it.
	if s := r.Start(operation(dispatch.Delete, machine, 4)); s.Phase != dispatch.Waiting {
		t.Errorf("Start of the next operation returned %+v", s)
	}
	bustest.Receive(t, "the driver to get the delete", g.entered)
	r.until(t, machine.UID, dispatch.Done)
	r.Settle(machine.UID, "m1-uid.delete.4")
	bustest.Eventually(t, "results forgotten by the replica", func() bool { return len(r.session(rep).GetOperations()) == 0 })
}

func TestWaitsForADriver(t *testing.T) {
	t.Parallel()
	r, machine := newRig(t), newMachine("m1")
	op := operation(dispatch.Create, machine, 0)
	r.Start(op)
	r.noticed(t, machine)
	waiting := r.Start(op)
	if waiting.Phase != dispatch.Waiting || waiting.Attempt != 0 || !waiting.Waited {
		t.Errorf("operation without a driver is %+v", waiting)
	}
	contains(t, waiting.Reason, "no driver for provider virtual")
	g := newGate(t)
	r.replica(t, g.handle)
	bustest.Receive(t, "the driver to get the create", g.entered)
	r.noticed(t, machine) // that the reason is history
	if s := r.Start(op); s.Phase != dispatch.Running || !s.Waited {
		t.Errorf("operation with a driver is %+v, want running and marked as one that waited", s)
	}
	g.release()
	r.noticed(t, machine)
	if s := r.Start(op); s.Phase != dispatch.Done || s.Err != nil || s.Attempt != 1 {
		t.Errorf("operation has ended as %+v", s)
	}
}

func TestWaitsForRoom(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	g := newGate(t)
	r.replica(t, g.handle, func(c *replica.Config) { c.Slots = 1 })
	first, second := newMachine("m1"), newMachine("m2")
	r.Start(operation(dispatch.Create, first, 0))
	bustest.Receive(t, "the driver to get the first create", g.entered)
	r.Start(operation(dispatch.Create, second, 0))
	r.waits(t, second.Name, "busy")
	if s, _ := r.State(second.UID); s.Phase != dispatch.Waiting || s.Reason != "" || s.Waited {
		t.Errorf("state = %+v, want a wait that its machine says nothing of yet", s)
	}
	g.release()
	for _, m := range []*v1alpha1.Machine{first, second} {
		if s := r.until(t, m.UID, dispatch.Done); s.Err != nil {
			t.Errorf("create of %s: %v", m.Name, s.Err)
		}
	}
}

func TestFailure(t *testing.T) {
	t.Parallel()
	r, machine := newRig(t), newMachine("m1")
	g := newGate(t)
	g.answer = func(*replica.Task) *driverv1.Result {
		return &driverv1.Result{
			Status: bus.StatusOf(&bus.Error{Code: driverv1.Code_CODE_RESOURCE_EXHAUSTED, RetryAfter: 7 * time.Second}),
			Payload: &driverv1.Result_Create{
				Create: &driverv1.CreateResponse{LastKnownState: "half"},
			},
		}
	}
	g.release()
	r.replica(t, g.handle)
	r.Start(operation(dispatch.Create, machine, 0))
	s := r.until(t, machine.UID, dispatch.Done)
	if dispatch.CodeOf(s.Err) != dispatch.ResourceExhausted || dispatch.RetryAfter(s.Err) != 7*time.Second {
		t.Errorf("error is %v with code %v and retry after %v", s.Err, dispatch.CodeOf(s.Err), dispatch.RetryAfter(s.Err))
	}
	if !s.Stated || s.LastKnownState != "half" || s.Instance != nil {
		t.Errorf("payload of the failure is %+v", s)
	}
}

func TestUnsendable(t *testing.T) {
	t.Parallel()
	r, machine := newRig(t), newMachine("m1")
	r.replica(t, atOnce)
	machine.Annotations = map[string]string{"huge": strings.Repeat("x", 8<<20)} // beyond what NATS takes
	r.Start(operation(dispatch.Create, machine, 0))
	s := r.until(t, machine.UID, dispatch.Done)
	if dispatch.CodeOf(s.Err) != dispatch.InvalidArgument || s.Attempt != 0 {
		t.Errorf("operation that cannot be sent ended with %v (%v), attempt %d", s.Err, dispatch.CodeOf(s.Err), s.Attempt)
	}
}

func TestCancelWhileWaiting(t *testing.T) {
	t.Parallel()
	r, machine := newRig(t), newMachine("m1")
	op := operation(dispatch.Create, machine, 0)
	r.Start(op)
	r.noticed(t, machine)
	if err := r.Cancel(machine.UID, op.ID()); err != nil {
		t.Fatal(err)
	}
	if err := r.Cancel(machine.UID, op.ID()); err != nil {
		t.Fatal("second Cancel:", err)
	}
	r.noticed(t, machine)
	s := r.Start(op)
	if s.Phase != dispatch.Done || dispatch.CodeOf(s.Err) != dispatch.Canceled || s.Attempt != 0 {
		t.Errorf("cancelled operation is %+v, want done with Canceled and no attempt", s)
	}
	g := newGate(t)
	r.replica(t, g.handle)
	r.Settle(machine.UID, op.ID())
	// What follows would find the create in the driver's hands.
	r.Start(operation(dispatch.Delete, machine, 1))
	if got := bustest.Receive(t, "the driver to get the delete", g.entered); got.Operation != driverv1.Operation_OPERATION_DELETE {
		t.Errorf("the driver got %v", got.Operation)
	}
}

func TestCancelWhileRunning(t *testing.T) {
	t.Parallel()
	r, machine := newRig(t), newMachine("m1")
	g := newGate(t)
	r.replica(t, g.handle)
	op := operation(dispatch.Create, machine, 0)
	r.Start(op)
	bustest.Receive(t, "the driver to get the create", g.entered)
	r.until(t, machine.UID, dispatch.Running)
	if err := r.Cancel(machine.UID, op.ID()); err != nil {
		t.Fatal(err)
	}
	s := r.until(t, machine.UID, dispatch.Done)
	if dispatch.CodeOf(s.Err) != dispatch.Canceled || s.Attempt != 1 {
		t.Errorf("cancelled operation is %+v, want done with Canceled after one attempt", s)
	}
	if err := r.Cancel(machine.UID, op.ID()); err != nil {
		t.Error("Cancel of what has ended:", err)
	}
	if err := r.Cancel("nobody", op.ID()); err != nil {
		t.Error("Cancel of what never was:", err)
	}
}

// A replica that does not know what came of an operation is asked for the same
// one again, not for another.
func TestOutcomeUnknown(t *testing.T) {
	t.Parallel()
	r, machine := newRig(t), newMachine("m1")
	requests := make(chan *driverv1.Envelope, 9)
	r.replica(t, func(_ context.Context, task *replica.Task) *driverv1.Result {
		requests <- task.Request
		if task.Request.GetAttempt() == 1 {
			return &driverv1.Result{
				Status:         &driverv1.Status{Code: driverv1.Code_CODE_UNAVAILABLE, Message: "connection reset"},
				OutcomeUnknown: true,
			}
		}

		return created(task)
	})
	op := operation(dispatch.Create, machine, 0)
	r.Start(op)
	if s := r.until(t, machine.UID, dispatch.Waiting); !strings.Contains(s.Reason, "connection reset") {
		bustest.Eventually(t, "the reason is reported", func() bool {
			s, _ := r.State(machine.UID)

			return strings.Contains(s.Reason, "connection reset")
		})
	}
	if s := r.until(t, machine.UID, dispatch.Done); s.Err != nil || s.Attempt != 2 {
		t.Errorf("operation ended with %v after %d attempts, want success after 2", s.Err, s.Attempt)
	}
	first := bustest.Receive(t, "the first request", requests)
	second := bustest.Receive(t, "the second request", requests)
	if first.GetOperationId() != second.GetOperationId() || first.GetRecover() || !second.GetRecover() {
		t.Errorf("requests were %s (recover %v) and %s (recover %v), want one id and recover with the second",
			first.GetOperationId(), first.GetRecover(), second.GetOperationId(), second.GetRecover())
	}
}

// Who cancels an operation by what an old object says must not hit a newer one.
func TestCancelOfAnEarlierOperation(t *testing.T) {
	t.Parallel()
	r, machine := newRig(t), newMachine("m1")
	g := newGate(t)
	r.replica(t, g.handle)
	running := operation(dispatch.Delete, machine, 2)
	r.Start(running)
	bustest.Receive(t, "the driver to get the delete", g.entered)
	earlier := operation(dispatch.Initialize, machine, 1)
	if err := r.Cancel(machine.UID, earlier.ID()); err != nil {
		t.Fatal(err)
	}
	g.release()
	if s := r.until(t, machine.UID, dispatch.Done); s.Err != nil {
		t.Errorf("delete ended with %v after the cancel of an operation before it", s.Err)
	}
}

// A create that is cancelled before its replica has said that it has it must be
// cancelled there too.
func TestCancelOnTheWay(t *testing.T) {
	t.Parallel()
	r, machine := newRig(t), newMachine("m1")
	g := newGate(t)
	rep := r.replica(t, g.handle)
	op := operation(dispatch.Create, machine, 0)
	r.Start(op)
	if err := r.Cancel(machine.UID, op.ID()); err != nil {
		t.Fatal(err)
	}
	s := r.until(t, machine.UID, dispatch.Done)
	if dispatch.CodeOf(s.Err) != dispatch.Canceled {
		t.Errorf("cancelled operation ended with %v", s.Err)
	}
	bustest.Eventually(t, "replica idle", func() bool { return r.session(rep).GetRunning() == 0 })
}

func TestForget(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	g := newGate(t)
	rep := r.replica(t, g.handle)
	running, waiting, ended, settled := newMachine("running"), newMachine("waiting"), newMachine("ended"), newMachine("settled")
	r.Start(operation(dispatch.Create, running, 0))
	bustest.Receive(t, "the driver to get the create", g.entered)
	other := operation(dispatch.Create, waiting, 0)
	other.Provider = "absent"
	r.Start(other)
	r.noticed(t, waiting)
	for _, m := range []string{"ended", "settled"} {
		op := operation(dispatch.Create, newMachine(m), 0)
		op.Timeout = time.Millisecond // the gate lets go by itself
		r.Start(op)
		r.until(t, op.Machine.UID, dispatch.Done)
	}
	r.Settle(settled.UID, "settled-uid.create.0")
	for _, m := range []*v1alpha1.Machine{running, waiting, ended, settled} {
		r.Forget(m.UID)
		bustest.Eventually(t, m.Name+" forgotten", func() bool {
			_, known := r.State(m.UID)

			return !known
		})
	}
	r.Forget("nobody")
	bustest.Eventually(t, "replica free of all", func() bool { return len(r.session(rep).GetOperations()) == 0 })
	// After Forget numbers start again.
	if s := r.Start(operation(dispatch.Create, settled, 0)); s.Phase != dispatch.Waiting {
		t.Errorf("Start after Forget returned %+v", s)
	}
}

func TestRecoverAttaches(t *testing.T) {
	t.Parallel()
	r, machine := newRig(t), newMachine("m1")
	g := newGate(t)
	rep := r.replica(t, g.handle)
	op := operation(dispatch.Create, machine, 5)
	r.Start(op)
	bustest.Receive(t, "the driver to get the create", g.entered)
	r.stop() // the first manager is gone, its operation goes on

	second := r.newManager(t)
	op.Recover, op.Attempt = true, 1
	second.Start(op)
	s := second.until(t, machine.UID, dispatch.Running)
	if s.Replica != rep.Replica() || s.Attempt != 1 {
		t.Errorf("recovered operation is %+v, want the same attempt at the same replica", s)
	}
	g.release()
	s = second.until(t, machine.UID, dispatch.Done)
	if s.Err != nil || s.Instance == nil || s.Instance.ProviderID != "virtual://m1" {
		t.Errorf("recovered operation ended as %+v", s)
	}
	if len(g.entered) != 0 {
		t.Error("the driver got the create twice")
	}
}

func TestOnlyIfHeld(t *testing.T) {
	t.Parallel()
	r, machine := newRig(t), newMachine("m1")
	g := newGate(t)
	r.replica(t, g.handle)
	op := operation(dispatch.Create, machine, 0)
	op.Recover, op.Attempt, op.OnlyIfHeld = true, 1, true
	r.Start(op)
	s := r.until(t, machine.UID, dispatch.Done)
	if dispatch.CodeOf(s.Err) != dispatch.NotFound || s.Attempt == 0 {
		t.Errorf("operation that no replica holds is %+v, want NotFound after an attempt", s)
	}
	if len(g.entered) != 0 {
		t.Error("the driver got an operation that was only to be looked for")
	}
}

// The outcome of a create whose replica died is unknown: cancelled, it must not
// be tried at another one.
func TestCancelAfterDeath(t *testing.T) {
	t.Parallel()
	r, machine := newRig(t), newMachine("m1")
	g := newGate(t)
	cut := r.losable(t, g)
	op := operation(dispatch.Create, machine, 0)
	r.Start(op)
	bustest.Receive(t, "the driver to get the create", g.entered)
	r.until(t, machine.UID, dispatch.Running)
	cut()
	s := r.until(t, machine.UID, dispatch.Waiting)
	if s.Attempt != 1 {
		t.Errorf("operation of a dead replica is %+v, want one attempt", s)
	}
	other := newGate(t)
	if err := r.Cancel(machine.UID, op.ID()); err != nil {
		t.Fatal(err)
	}
	r.replica(t, other.handle)
	s = r.until(t, machine.UID, dispatch.Done)
	if code := dispatch.CodeOf(s.Err); code != dispatch.NotFound || s.Attempt == 0 {
		t.Errorf("cancelled operation is %+v, want NotFound after an attempt", s)
	}
	if len(other.entered) != 0 {
		t.Error("a cancelled create went to another replica")
	}
}

// While there is a reason to send nothing, an operation waits for that, says so, and
// goes on by itself. One that is given up meanwhile ends.
func TestBarred(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var mu sync.Mutex
	reason := errors.New("another control plane has this one's name")
	r.Bar(func() error {
		mu.Lock()
		defer mu.Unlock()

		return reason
	})
	var asked atomic.Int64
	r.replica(t, func(ctx context.Context, task *replica.Task) *driverv1.Result {
		asked.Add(1)

		return atOnce(ctx, task)
	})
	machine, other := newMachine("m1"), newMachine("m2")
	r.Start(operation(dispatch.Create, machine, 0))
	givenUp := r.Start(operation(dispatch.Create, other, 0))
	bustest.Eventually(t, "both operations to wait for that", func() bool {
		one, _ := r.State(machine.UID)
		two, _ := r.State(other.UID)

		return strings.Contains(one.Reason, "this one's name") && strings.Contains(two.Reason, "this one's name")
	})
	if err := r.Cancel(other.UID, givenUp.ID); err != nil {
		t.Error(err)
	}
	if state := r.until(t, other.UID, dispatch.Done); dispatch.CodeOf(state.Err) != dispatch.Canceled || state.Attempt != 0 {
		t.Errorf("the one that was given up ended as %+v", state)
	}
	if n := asked.Load(); n != 0 {
		t.Errorf("the driver was asked %d times", n)
	}
	mu.Lock()
	reason = nil
	mu.Unlock()
	if state := r.until(t, machine.UID, dispatch.Done); state.Err != nil {
		t.Errorf("the one that waited ended with %v", state.Err)
	}
}
