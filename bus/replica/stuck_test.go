package replica_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A hanging driver ignores its contexts until it is released.
type hanging struct {
	entered chan *replica.Task
	open    chan struct{}
	release func()
	begins  bool // calls the cloud, as far as the bus knows
}

func newHanging(tb testing.TB, begins bool) *hanging {
	tb.Helper()
	h := &hanging{entered: make(chan *replica.Task, 100), open: make(chan struct{}), begins: begins}
	h.release = sync.OnceFunc(func() { close(h.open) })
	tb.Cleanup(h.release)

	return h
}

func (h *hanging) handle(_ context.Context, t *replica.Task) *driverv1.Result {
	if h.begins {
		if err := t.BeginMutation(); err != nil {
			return &driverv1.Result{Status: bus.StatusOf(err)}
		}
	}
	h.entered <- t
	h.hang()

	return optest.Created(t)
}

// hang has a name to look for in stacks.
//
//go:noinline
func (h *hanging) hang() { <-h.open }

// impatient gives calls up soon, and logs to where they may be looked at.
func impatient(log *optest.Violations) func(*replica.Config) {
	return func(cfg *replica.Config) {
		cfg.StuckAfter = 200 * time.Millisecond
		cfg.Logger = log.Warnings()
	}
}

// briefly is a create that may take a moment.
func briefly(machine string) caller.Request {
	req := optest.Create(machine)
	req.Timeout = time.Second

	return req
}

// deletes is the delete of a create's machine.
func deletes(req caller.Request) caller.Request {
	m := bus.MachineOf(req.Body)
	req.OperationID = m.GetUid() + ".delete.1"
	req.Body = &driverv1.Envelope{Body: &driverv1.Envelope_Delete{Delete: &driverv1.DeleteRequest{Machine: m}}}
	req.Recover, req.Attempt, req.Until = false, 0, time.Time{}

	return req
}

// A call that ignores its deadline is answered for, its machine goes on at other
// replicas, and what it comes to in the end is no outcome of anything.
func TestStuck(t *testing.T) {
	t.Parallel()
	r, h, log := optest.NewStoredRig(t), newHanging(t, true), &optest.Violations{}
	stuck := r.Replica(t, h.handle, impatient(log))
	req := briefly("m")
	out, err := r.Caller.Call(t.Context(), req)
	optest.WantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_DEADLINE_EXCEEDED)
	if !out.Result.GetOutcomeUnknown() || !strings.Contains(err.Error(), "restart replica "+stuck.Replica()) {
		t.Errorf("error = %v, result = %v, want an unknown outcome with the remedy", err, out.Result)
	}
	bustest.Eventually(t, "the session says what is stuck", func() bool {
		s := r.Session(stuck)
		ops := s.GetOperations()

		return s.GetRunning() == 1 && len(ops) == 1 && ops[0].GetStuck() && ops[0].GetOperationId() == req.OperationID
	})
	if got := stuck.Stuck(); got[driverv1.Operation_OPERATION_CREATE] != 1 || len(got) != 1 {
		t.Errorf("stuck = %v, want one create", got)
	}
	if err := stuck.Jammed(); err != nil {
		t.Errorf("jammed = %v, although slots are free", err)
	}

	// Alone, it can do nothing for the machine.
	req.Recover, req.Attempt, req.Until = true, out.Attempts, out.Until
	_, err = r.Caller.Call(t.Context(), req)
	optest.WantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_ABORTED)
	if !strings.Contains(err.Error(), "restart that replica") {
		t.Errorf("error = %v, want the remedy", err)
	}

	looks := make(chan bool, 9)
	r.Replica(t, func(_ context.Context, task *replica.Task) *driverv1.Result {
		looks <- task.Request.GetRecover()

		return optest.Created(task)
	})
	req.Timeout = time.Minute
	optest.WantOK(t, bustest.Receive(t, "the outcome", optest.Call(t.Context(), r.Caller, req)))
	if !bustest.Receive(t, "the other replica's attempt", looks) {
		t.Error("the other replica was not asked to look first")
	}
	optest.WantOK(t, bustest.Receive(t, "the end of the delete", optest.Call(t.Context(), r.Caller, deletes(req))))

	h.release()
	bustest.Eventually(t, "slot and machine are free", func() bool {
		return r.Session(stuck).GetRunning() == 0 && len(r.Session(stuck).GetOperations()) == 0 && len(stuck.Stuck()) == 0
	})
	if c := r.ClaimOf(t, req); c.GetOperationId() != deletes(req).OperationID {
		t.Errorf("claim = %v, want that of the delete: the late result does not count", c)
	}
	for text, want := range map[string]int{"ignores its deadline;": 1, "(*hanging).hang": 1, "has returned": 1, "provider_id=virtual://m": 1} {
		if got := strings.Count(log.All(), text); got != want {
			t.Errorf("the log has %q %d times, want %d:\n%s", text, got, want, log.All())
		}
	}
}

// Where nothing tells creates apart, a call that ignores its deadline may make an instance
// at any time: nothing else is begun until it has returned.
func TestStuck_NoIdentity(t *testing.T) {
	t.Parallel()
	r, h := optest.NewStoredRig(t), newHanging(t, true)
	none := optest.Identity(driverv1.CreateIdentity_CREATE_IDENTITY_NONE)
	stuck := r.Replica(t, h.handle, impatient(&optest.Violations{}), none)
	req := briefly("m")
	out, err := r.Caller.Call(t.Context(), req)
	optest.WantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_DEADLINE_EXCEEDED)
	bustest.Eventually(t, "the session says what is stuck", func() bool {
		ops := r.Session(stuck).GetOperations()

		return len(ops) == 1 && ops[0].GetStuck()
	})
	g := optest.NewGate(t)
	g.Release()
	r.Replica(t, g.Handle, none)
	why := make(chan string, 9)
	req.Recover, req.Attempt, req.Until, req.Timeout = true, out.Attempts, out.Until, time.Minute
	req.OnWaiting = func(_ uint32, err error) { why <- err.Error() }
	done := optest.Call(t.Context(), r.Caller, req)
	if got := bustest.Receive(t, "why it waits", why); !strings.Contains(got, "ignores its deadline at replica "+stuck.Replica()) {
		t.Errorf("it waits because of %q", got)
	}
	if n := g.Runs.Load(); n != 0 {
		t.Errorf("%d attempts were begun beside the stuck one", n)
	}
	h.release()
	optest.WantOK(t, bustest.Receive(t, "the outcome", done))
}

// What was not begun by the deadline cannot begin any more: it has failed for sure.
func TestStuck_BeforeItBegan(t *testing.T) {
	t.Parallel()
	r, h := optest.NewStoredRig(t), newHanging(t, false)
	rep := r.Replica(t, func(ctx context.Context, task *replica.Task) *driverv1.Result {
		h.handle(ctx, task)

		return &driverv1.Result{Status: bus.StatusOf(task.BeginMutation())}
	}, impatient(&optest.Violations{}))
	out, err := r.Caller.Call(t.Context(), briefly("m"))
	optest.WantError(t, err, bus.OriginDriver, driverv1.Code_CODE_DEADLINE_EXCEEDED)
	if out.Result.GetOutcomeUnknown() {
		t.Errorf("result = %v, want a known failure", out.Result)
	}
	h.release()
	bustest.Eventually(t, "the slot is free", func() bool { return r.Session(rep).GetRunning() == 0 })
}

// A replica with nothing but stuck calls says so, and leaves them behind when it stops.
func TestStuck_Jammed(t *testing.T) {
	t.Parallel()
	for name, one := range map[string]struct {
		request caller.Request
		slots   string
	}{
		"create": {briefly("m"), "slots for creates"},
		"delete": {deletes(briefly("m")), "slots for deletes"},
		"status": {func() caller.Request { req := optest.Status("m"); req.Timeout = time.Second; return req }(), "slots for reads"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, h := optest.NewStoredRig(t), newHanging(t, bus.Mutates(bus.OperationOf(one.request.Body)))
			rep := r.Replica(t, h.handle, impatient(&optest.Violations{}), func(cfg *replica.Config) {
				cfg.Slots, cfg.DrainTimeout = 1, time.Hour
			})
			_, err := r.Caller.Call(t.Context(), one.request)
			optest.WantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_DEADLINE_EXCEEDED)
			bustest.Eventually(t, "it says that it is jammed", func() bool {
				err := rep.Jammed()

				return err != nil && strings.Contains(err.Error(), one.slots) && strings.Contains(err.Error(), "restart this replica")
			})
			rep.Stop()
			if err := bustest.Receive(t, "the end, which waits for no stuck call", rep.Done); !errors.Is(err, replica.ErrLeft) {
				t.Errorf("Run: %v, want that something was left behind", err)
			}
		})
	}
}
