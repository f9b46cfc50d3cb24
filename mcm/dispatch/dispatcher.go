package dispatch

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel/trace"
	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A Caller is the part of caller.Caller that a Dispatcher uses.
type Caller interface {
	Call(ctx context.Context, req caller.Request) (*caller.Outcome, error)
	Room(provider string) <-chan struct{}
	Replicas() []caller.Replica
	Cancel(provider, operationID string) error
	Acknowledge(provider, replica, operationID string) error
}

// An Auditor publishes the outcomes of operations.
type Auditor interface {
	Audit(audit *driverv1.Audit) error
}

// retryWait is the time after which a waiting operation is retried without a signal of room.
const retryWait = time.Second

// A Dispatcher runs operations, one at a time for each machine. It is safe for
// concurrent use.
type Dispatcher struct {
	caller  Caller
	auditor Auditor
	metrics *metrics
	queue   *queue
	recent  recent
	barred  func() error // returns why no operation may be sent now, or nil
	waitLog waitLog
	patient time.Duration   // how long an operation waits for its turn before its machine's status says so
	ctx     context.Context //nolint:containedctx // operations end with the dispatcher, not with the caller of Start

	mu       sync.Mutex
	machines map[types.UID]*entry
	readings map[types.UID]*reading
	unserved map[string]*unserved // by provider
	answered map[string]bool      // providers of which a driver has answered a probe
	notify   func(types.NamespacedName)
	running  sync.WaitGroup
}

// An entry is the newest operation of a machine. Its mutable fields are
// guarded by Dispatcher.mu.
type entry struct {
	id       string
	kind     Kind
	number   int64
	machine  types.NamespacedName
	uid      types.UID
	provider string
	started  time.Time
	request  caller.Request
	turn     *turn
	class    int64 // its generation; 0 when another manager sent the operation
	span     trace.Span
	reportAt time.Time // when to notify of what it waits for, if it still waits; only run uses it

	state        State
	waitReported bool   // the last notice was a reason to wait
	machineGone  bool   // so no controller will settle this
	holder       string // replica that keeps the result until it is acknowledged
	settled      bool

	quit chan struct{} // closed by Cancel
}

// New returns a Dispatcher that stops following its operations when ctx ends. They continue
// at their drivers, and the next manager takes them up.
func New(ctx context.Context, client Caller, auditor Auditor) *Dispatcher {
	return &Dispatcher{
		caller: client, auditor: auditor, metrics: newMetrics(), queue: newQueue(Limits{}), patient: reportAfter, ctx: ctx,
		machines: map[types.UID]*entry{}, readings: map[types.UID]*reading{}, unserved: map[string]*unserved{},
		answered: map[string]bool{}, notify: func(types.NamespacedName) {}, barred: func() error { return nil },
	}
}

// Notify sets the function to call when a machine's operation has changed. It must be called
// before the first Start; f must not block.
func (d *Dispatcher) Notify(f func(types.NamespacedName)) { d.notify = f }

// Limit sets limits for operations; without it there are none. It must be called before the
// first Start.
func (d *Dispatcher) Limit(limits Limits) { d.queue = newQueue(limits) }

// Bar sets a function that is called before each operation is sent. While it returns an
// error, operations wait with that reason. It must be called before the first Start; why must
// not block.
func (d *Dispatcher) Bar(why func() error) { d.barred = why }

// Wait returns when the Dispatcher follows no more operations, after New's ctx has ended.
func (d *Dispatcher) Wait() { d.running.Wait() }

// Start begins an operation, unless it is in flight already, and returns its state. It never
// blocks. The caller stores the outcome of a Done operation, and then calls Settle. If the
// operation still waits for another provider than op's, Start cancels it.
func (d *Dispatcher) Start(op Operation) State {
	uid, id := op.Machine.UID, op.ID()
	d.mu.Lock()
	defer d.mu.Unlock()
	if e, ok := d.machines[uid]; ok {
		if state, known := d.compare(e, &op); known {
			return state
		}
	}
	e := &entry{
		id: id, kind: op.Kind, number: op.Number, provider: op.Provider, started: time.Now(),
		machine: types.NamespacedName{Namespace: op.Machine.Namespace, Name: op.Machine.Name}, uid: uid,
		state: State{Phase: Waiting, ID: id, Kind: op.Kind, Waited: op.WaitReported}, waitReported: op.WaitReported,
		quit: make(chan struct{}), span: startSpan(&op),
	}
	e.reportAt = e.started.Add(d.patient)
	e.request = caller.Request{
		Provider: op.Provider, Namespace: op.Machine.Namespace, Name: op.Machine.Name,
		OperationID: id, Body: request(&op), Timeout: op.Timeout, Recover: op.Recover, Attempt: op.Attempt,
		OnlyIfHeld: op.OnlyIfHeld, TraceParent: traceParent(e.span),
		OnAccepted: func(attempt uint32, replica string) { d.setRunning(e, attempt, replica) },
		OnProgress: func(message string) { d.progress(e, message) },
		OnWaiting:  func(attempts uint32, why error) { d.setWaiting(e, why, attempts) },
	}
	e.turn = newTurn(&op)
	if op.Class.Object != nil && !op.Recover {
		e.class = op.Class.Object.Generation
	}
	d.machines[uid] = e
	d.running.Go(func() { d.run(e) })

	return e.state
}

// compare compares an operation with the newest one of its machine, and returns the state of
// the former; known is false if Start has to begin it.
func (d *Dispatcher) compare(e *entry, op *Operation) (state State, known bool) {
	state = State{ID: op.ID(), Kind: op.Kind}
	switch {
	case e.settled && op.Number <= e.number:
		state.Phase, state.Settled = Stale, e.number+1
	case e.settled:
		return state, false
	case e.id == op.ID():
		if op.Provider != e.provider && op.Provider != "" && e.unsent() && !e.cancelled() {
			close(e.quit) // its class now names another driver
		}

		return e.state, true
	case op.Number < e.number:
		state.Phase, state.Settled = Stale, e.number
	case op.Number == e.number || e.state.Phase != Done:
		state.Phase, state.Reason = Refused, "operation "+e.id+" has not ended"
	default:
		// The caller counts the newest one, so it has stored that outcome without a Settle.
		d.settleLocked(e)

		return state, false
	}

	return state, true
}

// State returns the state of a machine's newest operation; false if there is none or if it is
// settled.
func (d *Dispatcher) State(uid types.UID) (State, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e, ok := d.machines[uid]
	if !ok || e.settled {
		return State{}, false
	}

	return e.state, true
}

// Settle says that the outcome of an operation is stored. Its replica may forget it, and it
// can never be started again.
func (d *Dispatcher) Settle(uid types.UID, id string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if e, ok := d.machines[uid]; ok && e.id == id && e.state.Phase == Done && !e.settled {
		d.settleLocked(e)
	}
}

// settleLocked settles an operation and acknowledges its result. The caller holds d.mu:
// publishing does not block.
func (d *Dispatcher) settleLocked(e *entry) {
	log := d.log(e, &e.state)
	// From now on only the number matters.
	e.settled, e.request, e.state = true, caller.Request{}, State{Phase: Done}
	if e.holder == "" {
		return
	}
	if err := d.caller.Acknowledge(e.provider, e.holder, e.id); err != nil {
		log.V(1).Info("cannot acknowledge the result; its replica keeps it for a day", "err", err.Error())
	}
}

// Forget drops the state of a machine that is gone. If the machine was removed by force while
// an operation is in flight, Forget cancels the operation.
func (d *Dispatcher) Forget(uid types.UID) {
	d.mu.Lock()
	d.stopReadingLocked(uid)
	d.withdrawLocked(uid, "")
	e, ok := d.machines[uid]
	ended := ok && e.state.Phase == Done
	switch {
	case ended && !e.settled:
		d.settleLocked(e)
		delete(d.machines, uid)
	case ended:
		delete(d.machines, uid)
	case ok:
		e.machineGone = true
	}
	var log logr.Logger
	if ok {
		log = d.log(e, &e.state)
	}
	d.mu.Unlock()
	if !ok || ended {
		return
	}
	log.Info("machine is gone; cancelling its operation")
	if err := d.Cancel(uid, e.id); err != nil {
		log.Info("cannot cancel the operation of a machine that is gone", "err", err.Error())
	}
}

// Cancel asks to end an operation early: at once if it waits, otherwise when its replica
// stops. Its outcome is still reported.
func (d *Dispatcher) Cancel(uid types.UID, id string) error {
	d.mu.Lock()
	e, ok := d.machines[uid]
	ok = ok && e.id == id && !e.settled && e.state.Phase != Done
	if ok && !e.cancelled() {
		close(e.quit)
	}
	d.mu.Unlock()
	if !ok {
		return nil
	}

	return d.caller.Cancel(e.provider, e.id)
}

// unsent reports whether an operation has not been sent to any driver.
func (e *entry) unsent() bool {
	return e.state.Phase == Waiting && e.state.Attempt == 0 && !e.request.Recover
}

func (e *entry) cancelled() bool {
	select {
	case <-e.quit:
		return true
	default:
		return false
	}
}

// InFlight reports whether an operation of a machine is in flight at a provider: a driver
// only gets bootstrap values for such an operation.
func (d *Dispatcher) InFlight(provider, operationID string, uid types.UID) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	e, ok := d.machines[uid]

	return ok && !e.settled && e.id == operationID && e.provider == provider
}

// run follows an operation until it ends or the dispatcher does.
func (d *Dispatcher) run(e *entry) {
	defer d.metrics.started(e.provider, e.kind)()
	defer e.span.End() // if the next manager takes up the operation
	req, quit := e.request, e.quit
	if req.Recover && !req.OnlyIfHeld {
		if !d.resume(e, &req) {
			return
		}
	} else {
		d.queue.enter(e.turn, req.Recover)
	}
	defer d.queue.leave(e.turn)
	for {
		if !d.awaitPermission(e, &req) {
			return
		}
		if e.cancelled() && req.Recover {
			// Begin nothing, but wait for a replica that may still have it.
			req.OnlyIfHeld, quit = true, nil
		}
		room := d.caller.Room(e.provider)
		out, err := d.caller.Call(d.ctx, req)
		if d.ctx.Err() != nil {
			return
		}
		if ended(err) {
			d.finish(e, out, err)

			return
		}
		carryAttempts(&req, out, err)
		d.recordWait(e, err, out.Attempts)
		if noRoom(err) {
			d.requeue(e, err)

			continue
		}
		wait := retryWait
		if out.Result != nil {
			// The driver does not know the outcome: a signal of room is no reason to retry.
			room, wait = nil, unknownWait(out.Attempts)
		}
		if !d.pause(room, quit, wait) {
			return
		}
		if e.cancelled() && !req.Recover {
			d.finish(e, out, Errorf(Canceled, "cancelled while it waited: %w", err))

			return
		}
	}
}

// recordWait records what an operation waits for: a slot, or the end of an error.
func (d *Dispatcher) recordWait(e *entry, err error, attempts uint32) {
	if d.noFreeSlot(e.provider, err) {
		d.setQueued(e, attempts)
	} else {
		d.setWaiting(e, err, attempts)
	}
}

// awaitPermission waits until an operation has its turn and nothing bars operations. It
// returns false if the operation has ended or the dispatcher ends.
func (d *Dispatcher) awaitPermission(e *entry, req *caller.Request) bool {
	if !d.awaitTurn(e, req) {
		return false
	}
	quit := e.quit
	if req.Recover {
		quit = nil // a driver may have it: even a cancelled one only ends after a driver was asked
	}
	for why := d.barred(); why != nil; why = d.barred() {
		d.setWaiting(e, why, req.Attempt)
		if !d.pause(nil, quit, retryWait) {
			return false
		}
		if e.cancelled() && !req.Recover {
			d.finish(e, &caller.Outcome{Waited: time.Since(e.started)}, Errorf(Canceled, "cancelled while it waited: %w", why))

			return false
		}
	}

	return true
}

// resume looks for a replica that has an operation which was begun before. If one has it,
// the operation is in flight, whatever the limits. Otherwise the operation enters the head of
// the queue: managers journal operations before they have their turn. It returns false if the
// operation has ended or the dispatcher ends.
func (d *Dispatcher) resume(e *entry, req *caller.Request) bool {
	look, found := *req, false
	look.Look = true
	look.OnAccepted = func(attempt uint32, replica string) {
		if !found {
			found = true
			d.queue.enter(e.turn, true)
		}
		req.OnAccepted(attempt, replica)
	}
	for wait := retryWait; ; wait = min(2*wait, 4*retryWait) {
		out, err := d.caller.Call(d.ctx, look)
		switch {
		case d.ctx.Err() != nil:
		case errors.Is(err, caller.ErrNotHeld):
			req.Attempt = out.Attempts
			carryUntil(req, out)
			d.queue.enterFirst(e.turn)

			return true
		case ended(err):
			d.finish(e, out, err)
		default:
			carryAttempts(&look, out, err)
			d.setWaiting(e, err, out.Attempts)
			if d.pause(nil, e.quit, wait) {
				if !e.cancelled() {
					continue
				}
				carryAttempts(req, out, err)
				if !found {
					d.queue.enter(e.turn, true)
				}

				return true
			}
		}
		if found {
			d.queue.leave(e.turn)
		}

		return false
	}
}

// carryAttempts makes the next call know of attempts that may have had an effect.
func carryAttempts(req *caller.Request, out *caller.Outcome, err error) {
	if bus.OriginOf(err) == bus.OriginTimeout {
		req.Recover, req.Attempt = true, out.Attempts
		carryUntil(req, out)
	}
}

func carryUntil(req *caller.Request, out *caller.Outcome) {
	req.Until = out.Until
}

// ended reports whether a call's error is the operation's outcome. Otherwise the call has to
// be repeated.
func ended(err error) bool {
	switch bus.OriginOf(err) {
	case bus.OriginBus:
		return CodeOf(err) == InvalidArgument // can never be sent
	case bus.OriginTimeout:
		return false
	default:
		return true
	}
}

// unknownWait returns the time until the next attempt after a replica that does not know the
// outcome: from two seconds to about two minutes.
func unknownWait(attempts uint32) time.Duration {
	const first = 2 * time.Second

	return first << min(attempts-1, 6)
}

// pause waits for a signal of room or of quit, at most for the given time. It returns false
// if the dispatcher ends.
func (d *Dispatcher) pause(room, quit <-chan struct{}, atMost time.Duration) bool {
	limit := time.NewTimer(atMost)
	defer limit.Stop()
	select {
	case <-room:
	case <-limit.C:
	case <-quit:
		return true
	case <-d.ctx.Done():
		return false
	}
	// All waiting operations get the same signal. Spread them, so that the first ones take
	// the free slots before the others ask.
	spread := time.NewTimer(rand.N(retryWait / 10))
	defer spread.Stop()
	select {
	case <-spread.C:
		return true
	case <-d.ctx.Done():
		return false
	}
}

// log returns a logger for lines about an operation in a state.
func (d *Dispatcher) log(e *entry, state *State) logr.Logger {
	log := logr.FromContextOrDiscard(d.ctx).WithValues("machine", e.machine.String(), "operation", e.kind,
		"operation_id", e.id, "provider", e.provider, "attempt", state.Attempt, "replica", state.Replica)
	if span := e.span.SpanContext(); span.IsSampled() {
		log = log.WithValues("trace_id", span.TraceID().String())
	}

	return log
}
