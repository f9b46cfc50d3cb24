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

// An Auditor publishes what became of operations.
type Auditor interface {
	Audit(audit *driverv1.Audit) error
}

// retryWait is how long a waiting operation waits for a sign of room before it
// looks again on its own; the spread keeps many of them apart.
const retryWait = time.Second

// A Dispatcher runs operations, one at a time for each machine. It is safe for
// concurrent use.
type Dispatcher struct {
	caller  Caller
	auditor Auditor
	metrics *metrics
	queue   *queue
	recent  recent
	barred  func() error // why no operation may be sent now
	causes  causes
	patient time.Duration   // how long an operation waits for its turn before its machine says so
	ctx     context.Context //nolint:containedctx // operations end with the dispatcher, not with who started them

	mu        sync.Mutex
	machines  map[types.UID]*entry
	readings  map[types.UID]*reading
	vacancies map[string]*vacancy // by provider
	answered  map[string]bool     // providers of which a driver was there, with sessions or without
	notify    func(types.NamespacedName)
	running   sync.WaitGroup
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
	tellAt   time.Time // when its machine says what it waits for, if it still waits; run's own

	state   State
	told    bool   // a reason to wait was notified or Told, and nothing since
	gone    bool   // the machine is: nobody will settle this
	holder  string // replica that keeps the result until it is acknowledged
	settled bool

	quit chan struct{} // closed when it is cancelled
}

// New returns a Dispatcher whose operations let go when ctx ends: then they go
// on at their drivers, for the next manager to take up.
func New(ctx context.Context, client Caller, auditor Auditor) *Dispatcher {
	return &Dispatcher{
		caller: client, auditor: auditor, metrics: newMetrics(), queue: newQueue(Limits{}), patient: tellAfter, ctx: ctx,
		machines: map[types.UID]*entry{}, readings: map[types.UID]*reading{}, vacancies: map[string]*vacancy{},
		answered: map[string]bool{}, notify: func(types.NamespacedName) {}, barred: func() error { return nil },
	}
}

// Notify sets who is told that a machine's operation changed. It must be called
// before the first Start; f must not block.
func (d *Dispatcher) Notify(f func(types.NamespacedName)) { d.notify = f }

// Limit sets limits on what is asked of drivers; there are none without. It must
// be called before the first Start.
func (d *Dispatcher) Limit(limits Limits) { d.queue = newQueue(limits) }

// Bar sets what is asked before an operation is sent. While it returns an error, no
// operation begins or is taken up: each waits, for that reason. It must be called before
// the first Start; why must not block.
func (d *Dispatcher) Bar(why func() error) { d.barred = why }

// Wait returns when all operations have let go after New's ctx ended.
func (d *Dispatcher) Wait() { d.running.Wait() }

// Start begins an operation, unless it is under way already, and returns what
// is known of it. It never blocks. The caller stores what a Done operation came
// to, and then calls Settle. An operation that still waits for another provider
// than op's is cancelled.
func (d *Dispatcher) Start(op Operation) State {
	uid, id := op.Machine.UID, op.ID()
	d.mu.Lock()
	defer d.mu.Unlock()
	if e, ok := d.machines[uid]; ok {
		if state, begun := d.against(e, &op); begun {
			return state
		}
	}
	e := &entry{
		id: id, kind: op.Kind, number: op.Number, provider: op.Provider, started: time.Now(),
		machine: types.NamespacedName{Namespace: op.Machine.Namespace, Name: op.Machine.Name}, uid: uid,
		state: State{Phase: Waiting, ID: id, Kind: op.Kind, Waited: op.Told}, told: op.Told,
		quit: make(chan struct{}), span: startSpan(&op),
	}
	e.tellAt = e.started.Add(d.patient)
	e.request = caller.Request{
		Provider: op.Provider, Namespace: op.Machine.Namespace, Name: op.Machine.Name,
		OperationID: id, Body: request(&op), Timeout: op.Timeout, Recover: op.Recover, Attempt: op.Attempt,
		OnlyIfHeld: op.OnlyIfHeld, TraceParent: traceParent(e.span),
		OnAccepted: func(attempt uint32, replica string) { d.accepted(e, attempt, replica) },
		OnProgress: func(message string) { d.progress(e, message) },
		OnWaiting:  func(attempts uint32, why error) { d.waiting(e, why, attempts) },
	}
	e.turn = newTurn(&op)
	if op.Class.Object != nil && !op.Recover {
		e.class = op.Class.Object.Generation
	}
	d.machines[uid] = e
	d.running.Go(func() { d.run(e) })

	return e.state
}

// against holds an operation against the newest one of its machine. It tells
// what is known of the asked one; begun is false when that has yet to begin.
func (d *Dispatcher) against(e *entry, op *Operation) (state State, begun bool) {
	state = State{ID: op.ID(), Kind: op.Kind}
	switch {
	case e.settled && op.Number <= e.number:
		state.Phase, state.Settled = Stale, e.number+1
	case e.settled:
		return state, false
	case e.id == op.ID():
		if op.Provider != e.provider && op.Provider != "" && e.unseen() && !e.cancelled() {
			close(e.quit) // its class names another driver by now
		}

		return e.state, true
	case op.Number < e.number:
		state.Phase, state.Settled = Stale, e.number
	case op.Number == e.number || e.state.Phase != Done:
		state.Phase, state.Reason = Refused, "operation "+e.id+" has not ended"
	default:
		// Its outcome is stored, or the caller would not count it; that the store
		// worked was lost on the way.
		d.release(e)

		return state, false
	}

	return state, true
}

// State returns what is known of a machine's newest operation; false when there
// is none, or when it is settled.
func (d *Dispatcher) State(uid types.UID) (State, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e, ok := d.machines[uid]
	if !ok || e.settled {
		return State{}, false
	}

	return e.state, true
}

// Settle says that the outcome of an operation is stored: its replica may
// forget it, and it can never be started again.
func (d *Dispatcher) Settle(uid types.UID, id string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if e, ok := d.machines[uid]; ok && e.id == id && e.state.Phase == Done && !e.settled {
		d.release(e)
	}
}

// release lets go of an operation that has ended. d.mu is held; publishing does
// not block.
func (d *Dispatcher) release(e *entry) {
	log := d.log(e, &e.state)
	// Only the number matters from now on.
	e.settled, e.request, e.state = true, caller.Request{}, State{Phase: Done}
	if e.holder == "" {
		return
	}
	if err := d.caller.Acknowledge(e.provider, e.holder, e.id); err != nil {
		log.V(1).Info("result not acknowledged; its replica keeps it for a day", "err", err.Error())
	}
}

// Forget drops what is remembered of a machine that is gone. An operation that
// has not ended, because somebody took the machine away from under it, is
// cancelled.
func (d *Dispatcher) Forget(uid types.UID) {
	d.mu.Lock()
	d.stopReading(uid)
	d.withdraw(uid, "")
	e, ok := d.machines[uid]
	ended := ok && e.state.Phase == Done
	switch {
	case ended && !e.settled:
		d.release(e)
		delete(d.machines, uid)
	case ended:
		delete(d.machines, uid)
	case ok:
		e.gone = true
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
		log.Info("operation of a machine that is gone not cancelled", "err", err.Error())
	}
}

// Cancel asks that an operation of a machine end early: at once when it waits, or
// as soon as the replica that has it lets go. Its outcome is still reported.
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

// unseen tells that no driver has heard of an operation so far.
func (e *entry) unseen() bool {
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

// InFlight tells whether an operation of a machine is under way at a provider:
// who asks for a machine's bootstrap values must have one.
func (d *Dispatcher) InFlight(provider, operationID string, uid types.UID) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	e, ok := d.machines[uid]

	return ok && !e.settled && e.id == operationID && e.provider == provider
}

// run has an operation done, for as long as it takes.
func (d *Dispatcher) run(e *entry) {
	defer d.metrics.started(e.provider, e.kind)()
	defer e.span.End() // of one that is left to the next manager
	req, quit := e.request, e.quit
	if req.Recover && !req.OnlyIfHeld {
		if !d.takeUp(e, &req) {
			return
		}
	} else {
		d.queue.enter(e.turn, req.Recover)
	}
	defer d.queue.leave(e.turn)
	for {
		if !d.mayGo(e, &req) {
			return
		}
		if e.cancelled() && req.Recover {
			// A replica may still be at it, and that is all there is to know.
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
		carry(&req, out, err)
		d.waits(e, err, out.Attempts)
		if noRoom(err) {
			d.giveBack(e, err)

			continue
		}
		again := retryWait
		if out.Result != nil {
			// No replica was lost, the cloud is in trouble: room is no news.
			room, again = nil, unknownWait(out.Attempts)
		}
		if !d.pause(room, quit, again) {
			return
		}
		if e.cancelled() && !req.Recover {
			d.finish(e, out, Errorf(Canceled, "given up while waiting: %w", err))

			return
		}
	}
}

// waits notes why an operation did not end: for a slot, or for what err says.
func (d *Dispatcher) waits(e *entry, err error, attempts uint32) {
	if d.full(e.provider, err) {
		d.queued(e, attempts)
	} else {
		d.waiting(e, err, attempts)
	}
}

// mayGo waits until an operation may be sent: until it has its turn and nothing bars
// operations. False means that it has ended, or that the dispatcher ends.
func (d *Dispatcher) mayGo(e *entry, req *caller.Request) bool {
	if !d.awaitTurn(e, req) {
		return false
	}
	quit := e.quit
	if req.Recover {
		quit = nil // it was begun: given up or not, it cannot end before somebody was asked
	}
	for why := d.barred(); why != nil; why = d.barred() {
		d.waiting(e, why, req.Attempt)
		if !d.pause(nil, quit, retryWait) {
			return false
		}
		if e.cancelled() && !req.Recover {
			d.finish(e, &caller.Outcome{Waited: time.Since(e.started)}, Errorf(Canceled, "given up while waiting: %w", why))

			return false
		}
	}

	return true
}

// takeUp finds out what became of an operation that was begun before. What a replica
// has is in flight, whatever the limits; the rest takes its place at the head of the
// queue, as a manager journals operations before they have their turn. False means
// that it has ended, or that the dispatcher ends.
func (d *Dispatcher) takeUp(e *entry, req *caller.Request) bool {
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
			d.queue.first(e.turn)

			return true
		case ended(err):
			d.finish(e, out, err)
		default:
			carry(&look, out, err)
			d.waiting(e, err, out.Attempts)
			if d.pause(nil, e.quit, wait) {
				if !e.cancelled() {
					continue
				}
				carry(req, out, err)
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

// carry has the next call know of the attempts that may have had an effect.
func carry(req *caller.Request, out *caller.Outcome, err error) {
	if bus.OriginOf(err) == bus.OriginTimeout {
		req.Recover, req.Attempt = true, out.Attempts
		carryUntil(req, out)
	}
}

func carryUntil(req *caller.Request, out *caller.Outcome) {
	req.Until = out.Until
}

// ended tells whether a call's error is the operation's outcome. Otherwise it
// is to be called again.
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

// unknownWait is how long an operation waits whose replica could not say what
// came of it: from two seconds to about two minutes.
func unknownWait(attempts uint32) time.Duration {
	const first = 2 * time.Second

	return first << min(attempts-1, 6)
}

// pause waits for a sign of room, for as long as given, or for quit; false means
// that the dispatcher ends.
func (d *Dispatcher) pause(room, quit <-chan struct{}, atMost time.Duration) bool {
	again := time.NewTimer(atMost)
	defer again.Stop()
	select {
	case <-room:
	case <-again.C:
	case <-quit:
		return true
	case <-d.ctx.Done():
		return false
	}
	// Everybody hears the same sign: spread out, so that the first ones take the
	// room there is before the others ask.
	spread := time.NewTimer(rand.N(retryWait / 10))
	defer spread.Stop()
	select {
	case <-spread.C:
		return true
	case <-d.ctx.Done():
		return false
	}
}

// log is for lines about an operation in some state of it.
func (d *Dispatcher) log(e *entry, state *State) logr.Logger {
	log := logr.FromContextOrDiscard(d.ctx).WithValues("machine", e.machine.String(), "operation", e.kind,
		"operation_id", e.id, "provider", e.provider, "attempt", state.Attempt, "replica", state.Replica)
	if span := e.span.SpanContext(); span.IsSampled() {
		log = log.WithValues("trace_id", span.TraceID().String())
	}

	return log
}
