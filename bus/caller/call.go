package caller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A Request describes one operation.
type Request struct {
	// Provider is the driver's. Namespace and Name are those of the machine or class,
	// for the subject. Requests about node groups have neither.
	Provider, Namespace, Name string
	// OperationID is the same for every attempt at this operation, across managers too.
	// No other operation uses it.
	OperationID string
	// Body is an envelope with the operation's request; Call fills in the rest.
	Body *driverv1.Envelope
	// Timeout is how long one attempt may take; 0 means a minute.
	Timeout time.Duration
	// Recover says that an earlier Call for this operation may have had an effect.
	// Attempt is the number of earlier attempts (Outcome.Attempts). Call then looks
	// for a replica that has the operation before it tries again.
	Recover bool
	Attempt uint32
	// Until, with Recover, is the last deadline of those attempts (Outcome.Until).
	// If it is zero, Call assumes about a Timeout from now.
	Until time.Time
	// OnlyIfHeld, with Recover, begins nothing: Call fails with NotFound if no replica
	// has the operation.
	OnlyIfHeld bool
	// Look, with Recover, begins nothing either. Call returns the outcome that a replica
	// or the operations stream has. It waits as long as a further attempt has to, and
	// fails like OnlyIfHeld once that attempt could begin.
	Look bool
	// TraceParent is the W3C traceparent header of each attempt, for the driver's spans.
	// It is empty when the operation is not traced.
	TraceParent string
	// OnAccepted, OnProgress and OnWaiting report events. They may be nil and must not
	// block. OnWaiting gets the reason why Call waits before a further attempt, if the
	// wait may be long.
	OnAccepted func(attempt uint32, replica string)
	OnProgress func(message string)
	OnWaiting  func(attempts uint32, why error)
}

// An Outcome is the result of a Call.
type Outcome struct {
	// Result is the driver's; nil if there is none.
	Result *driverv1.Result
	// Attempts is the number of attempts that may have had an effect, including those
	// before this Call.
	Attempts uint32
	// Until is the last deadline of these attempts.
	Until time.Time
	// Replica answered last; empty for a plain driver.
	Replica string
	// Plain: a driver without sessions answered.
	Plain bool
	// Partial: the outcome is from the operations stream and its sealed part cannot be
	// opened. Texts and the driver's last known state are missing.
	Partial bool
	// Waited is the time until a replica took the operation, Took the time from then to
	// the end.
	Waited, Took time.Duration
}

// Call runs an operation at a driver and returns its outcome. The Outcome is never
// nil. The error is an [*Error] whose origin says who failed:
//
//   - OriginDriver: a driver answered with this code; Outcome.Result holds its
//     payload.
//   - OriginBus: nothing ran. Unavailable: no replica of the provider took the
//     request; [Caller.Room] signals when to retry. Aborted: another operation of
//     the machine runs. InvalidArgument: the request cannot be sent.
//   - OriginTimeout: a mutation may have run. Call again with Recover. If a replica
//     reported this, Outcome.Result is its report.
//
// Call retries a read whose replica dies. A mutation whose replica dies goes to another
// replica with recover set, which first looks for what the dead one made. If the
// driver's creates have no identity, Call waits for the dead replica's deadline first.
// When ctx ends, Call returns its error and leaves the operation running.
//
// A request about node groups is a read that goes to any replica, never to one by name.
// If it changes a group and fails or gets no answer once a replica may have taken it,
// its outcome is unknown: OriginTimeout.
func (c *Caller) Call(ctx context.Context, req Request) (*Outcome, error) {
	if req.Timeout <= 0 {
		req.Timeout = bus.DefaultTimeout
	}
	now := time.Now()
	k := &call{
		c: c, req: &req, op: bus.OperationOf(req.Body), editsGroup: bus.EditsNodeGroup(req.Body), started: now, lastTry: now, recover: req.Recover,
	}
	if req.Recover {
		k.noteEarlierAttempt(max(1, req.Attempt))
		if !req.Until.IsZero() {
			k.until = req.Until
		}
	}
	k.number = k.lastRan + 1
	var err error
	switch {
	case k.op == driverv1.Operation_OPERATION_UNSPECIFIED:
		err = bus.Errorf(driverv1.Code_CODE_INVALID_ARGUMENT, "the request's body is not an operation")
	case k.op == driverv1.Operation_OPERATION_NODE_GROUPS:
		err = k.readGroups(ctx)
	case bus.Mutates(k.op):
		err = newMutation(k).mutate(ctx)
	default:
		err = k.read(ctx)
	}
	k.out.Attempts, k.out.Until = k.lastRan, k.until
	if k.taken.IsZero() {
		k.out.Waited = time.Since(k.started)
	} else {
		k.out.Waited, k.out.Took = k.taken.Sub(k.started), time.Since(k.taken)
	}

	return &k.out, err
}

// A call is the state of one Call.
type call struct {
	history

	c          *Caller
	req        *Request
	op         driverv1.Operation
	editsGroup bool // the request changes a node group
	started    time.Time
	taken      time.Time // when a replica last took the operation
	out        Outcome

	// Of the next try.
	number        uint32  // of the attempt
	recover       bool    // the replica must first look for what an earlier attempt made
	earlierMayRun bool    // an earlier attempt's call may still run, or have had its effect, when this one begins
	target        string  // the replica; empty for any
	replaces      *uint64 // sequence that its claim replaces, 0 for none; nil lets the replica decide

	// Of the tries so far.
	lastTry, firstTry time.Time
	limit             time.Time // of a read; zero for mutations
	sendErr           error     // of the last one, if it was not sent
	avoid             []string  // replicas that lost an attempt or have just refused one
	staleAt           string    // replica that refused a request as stale
	stuckAt           string    // replica where a call for this machine ignores its deadline

	plainClaim   uint64    // sequence of the claim that this call wrote for a plain driver; 0 for none
	plainClaimAt time.Time // just before the write
}

// log returns a logger with the operation's fields.
func (k *call) log() *slog.Logger {
	object := "machine"
	if bus.MachineOf(k.req.Body) == nil {
		object = "class"
	}

	return k.c.log.With(object, k.req.Namespace+"/"+k.req.Name, "operation", bus.Verb(k.op), "operation_id", k.req.OperationID,
		"provider", k.req.Provider, "attempt", k.number, "replica", k.out.Replica)
}

// noteMayHaveRun notes that the last try may have an effect.
func (k *call) noteMayHaveRun() { k.noteAttempt(k.number, k.lastTry.Add(bus.AcceptBy+k.req.Timeout)) }

// noteEarlierAttempt notes an attempt by another caller, or by an earlier Call, at an
// unknown time.
func (k *call) noteEarlierAttempt(attempt uint32) {
	k.noteAttempt(attempt, time.Now().Add(bus.AcceptBy+k.req.Timeout))
}

// prepareAttempt notes that the next try may begin a new attempt.
func (k *call) prepareAttempt() {
	k.earlierMayRun = false
	if k.number <= k.lastRan { // the try only asks for the outcome of an earlier attempt
		return
	}
	k.noteSent(k.number)
	switch {
	case k.lastRan == 0:
	case k.op == driverv1.Operation_OPERATION_CREATE:
		_, settle := k.c.replicas.identity(k.req.Provider)
		k.earlierMayRun = !k.nothingBegun && k.lastTry.Before(k.lastDeadline().Add(settle)) ||
			k.c.replicas.stuckAt(k.req.Provider, k.req.OperationID) != ""
	default:
		// An earlier attempt may have caused the state that this one meets.
		k.earlierMayRun = k.editsGroup
		k.recover = k.recover || k.editsGroup
	}
}

// reportWaiting reports why the call waits, possibly for long.
func (k *call) reportWaiting(why *bus.Error) {
	k.log().Info("waiting", "why", why)
	if k.req.OnWaiting != nil {
		k.req.OnWaiting(k.lastRan, why)
	}
}

// A verdict is how one try ended.
type verdict int

const (
	gotResult      verdict = iota
	gotBusy                // refused, nothing ran
	gotNoResponder         // nothing subscribes the subject, nothing ran
	gotUnsent              // not sent, nothing ran: sendErr says why
	gotSilence             // no frame at all: unknown
	gotHolderDied          // the holder died: unknown
	gotDenial              // the holder denies having the operation: nothing runs there
	gotOverdue             // the holder lives, but the deadline has passed
	gotContextEnd          // the caller's context ended
)

// sendAndFollow sends the request once and follows it to a verdict and its last state.
func (k *call) sendAndFollow(ctx context.Context) (verdict, attemptState) {
	tree := bus.TreeDriver
	switch {
	case k.op == driverv1.Operation_OPERATION_NODE_GROUPS:
		tree = bus.TreeNodeGroup
	case k.target != "":
		tree = bus.TreeReplica
	}
	a := newAttempt(k.req.OperationID, k.number, tree, k.target)
	unregister, err := k.send(a)
	defer unregister()
	if err != nil {
		k.sendErr = k.notSent(err)

		return gotUnsent, attemptState{}
	}
	f := follow{k: k, a: a, timer: time.NewTimer(k.limitToRead(acceptTimeout)), unbind: func() {}}
	defer func() { f.timer.Stop(); f.unbind() }()
	v := f.run(ctx)
	k.out.Replica = f.state.holder
	if v == gotBusy {
		k.out.Replica = f.state.busyAt
	}
	if k.out.Replica != "" && bus.Mutates(k.op) {
		k.c.replicas.noteTrust(k.req.Provider, k.out.Replica, answers)
	}

	return v, f.state
}

// limitToRead limits d to the remaining time of a read. A context for that would cost
// each read a twentieth of its round trip.
func (k *call) limitToRead(d time.Duration) time.Duration {
	if k.limit.IsZero() {
		return d
	}

	return min(d, max(0, time.Until(k.limit)))
}

// readTimedOut reports whether a read's deadline has passed.
func (k *call) readTimedOut() bool { return !k.limit.IsZero() && !time.Now().Before(k.limit) }

// notSent tells an outage from a request that cannot be sent.
func (k *call) notSent(err error) error {
	if errors.Is(err, bus.ErrSubject) || errors.Is(err, bus.ErrEncode) || errors.Is(err, bus.ErrTooLarge) {
		return k.unsendable(err)
	}

	return k.notConnected()
}

// send publishes the request. It registers a's reply subject first, as a reply may
// come before publish returns.
func (k *call) send(a *attempt) (unregister func(), err error) {
	k.lastTry = time.Now()
	if k.firstTry.IsZero() {
		k.firstTry = k.lastTry
	}
	subject, err := k.subject(a.tree, a.target)
	if err != nil {
		return func() {}, err
	}
	reply, unregister := k.c.register(k.req.Provider, func(m *nats.Msg) {
		if why := a.onMessage(m); why != "" {
			k.c.dropReply(m.Subject, why)
		}
	})
	k.prepareAttempt()
	err = k.c.publish(subject, reply, k.req.TraceParent, k.envelope(a.tree, time.Now()))
	if err != nil {
		k.log().Debug("request not sent", "err", err)
	}

	return unregister, err
}

// subject returns the request's subject; replica is empty for any.
func (k *call) subject(tree bus.Tree, replica string) (string, error) {
	return bus.Subject{
		Cluster: k.c.cfg.Cluster, Tree: tree, Provider: k.req.Provider, Replica: replica,
		Verb: bus.RequestVerb(k.req.Body), Namespace: k.req.Namespace, Name: k.req.Name,
	}.Build()
}

// envelope returns the envelope of this try. For a plain driver its age counts from the
// claim: a process frozen since may have lost that claim.
func (k *call) envelope(tree bus.Tree, now time.Time) *driverv1.Envelope {
	if tree == bus.TreePlain && k.plainClaim != 0 {
		now = k.plainClaimAt
	}
	env := &driverv1.Envelope{
		OperationId: k.req.OperationID, Attempt: k.number, Epoch: k.c.cfg.Epoch(), Owner: k.c.cfg.Owner, Recover: k.recover,
		EarlierMayRun: k.earlierMayRun && !k.editsGroup,
		AcceptBy:      timestamppb.New(now.Add(bus.AcceptBy)), Timeout: durationpb.New(k.req.Timeout),
		Body: k.req.Body.GetBody(),
	}
	if bus.Mutates(k.op) && tree != bus.TreePlain {
		env.ClaimTerms = &driverv1.ClaimTerms{StreamMade: k.c.streams.madeAt(k.req.Provider), Sequence: k.replaces}
	}

	return env
}

// read runs an operation that may run any number of times.
func (k *call) read(ctx context.Context) error {
	for k.limit = k.started.Add(k.req.Timeout); ; {
		if err := k.chooseTarget(); err != nil {
			return err
		}
		v, state := k.sendAndFollow(ctx)
		switch v {
		case gotNoResponder:
			if k.target == "" {
				return newPlainCall(k).read(ctx)
			}
			k.avoid = append(k.avoid, k.target) // it has left since its last session
			k.target = ""
		case gotBusy:
			if done, err := k.retryAtOtherReplica(); done {
				return err
			}
		case gotSilence, gotHolderDied, gotDenial:
			k.number++
			k.target = ""
			if v == gotSilence && len(k.c.replicas.live(k.req.Provider)) == 0 {
				return newPlainCall(k).read(ctx) // a wiretap on requests hides that no driver subscribes
			}
		default:
			return k.endRead(ctx, v, state.result)
		}
	}
}

// readGroups is read for node groups. Any replica may answer; plain drivers have none.
// It asks no replica by name: the user may lack permission for such subjects.
func (k *call) readGroups(ctx context.Context) error {
	for k.limit = k.started.Add(k.req.Timeout); ; k.number++ {
		v, state := k.sendAndFollow(ctx)
		switch v {
		case gotNoResponder:
			return k.tryError("no replica of provider %s that serves node groups is on the bus", k.req.Provider)
		case gotBusy:
			if state.busy.GetReason() == driverv1.BusyReason_BUSY_REASON_STALE {
				k.staleAt = k.out.Replica
			}

			return k.allBusy()
		case gotSilence, gotHolderDied, gotDenial:
			if k.editsGroup {
				k.noteMayHaveRun()
			}
		default:
			return k.endRead(ctx, v, state.result)
		}
	}
}

// endRead ends a read at a verdict that no other try would change.
func (k *call) endRead(ctx context.Context, v verdict, result *driverv1.Result) error {
	switch {
	case v == gotResult:
		return k.endWithResult(result)
	case v == gotUnsent:
		return k.sendErr
	case v == gotOverdue:
		return bus.OutcomeUnknownf("no answer from the driver of provider %s within %s", k.req.Provider, k.req.Timeout)
	case k.editsGroup:
		return bus.OutcomeUnknownf("no answer from the driver of provider %s in time: %w", k.req.Provider, ctx.Err())
	default:
		return ctx.Err() //nolint:wrapcheck // the caller's own
	}
}

func (k *call) endWithResult(result *driverv1.Result) error {
	k.out.Result = result
	err := bus.ErrorOf(result.GetStatus())
	own := result.GetOutcomeUnknown() && !result.GetNoEffect()
	if !own {
		k.noteEnded(k.number)
	}
	failure, ok := errors.AsType[*bus.Error](err)
	switch {
	case !ok, !result.GetOutcomeUnknown() && !k.earlierMayRun:
		return err
	case own || !k.earlierMayRun: // the replica itself does not know
	case k.editsGroup:
		failure.Err = fmt.Errorf("%w (retried: an earlier attempt may have done it)", failure.Err)
	default: // a plain driver may not know of the earlier attempt
		failure.Err = fmt.Errorf("%w (retried: the call of an earlier attempt may still make the instance)", failure.Err)
	}
	failure.Origin = bus.OriginTimeout

	return failure
}

func (k *call) notConnected() error {
	return k.tryError("not connected to NATS; waiting for the connection")
}

func (k *call) unsendable(err error) error {
	e := k.tryError("the request cannot be sent: %w", err)
	e.Code = driverv1.Code_CODE_INVALID_ARGUMENT

	return e
}

func (k *call) allBusy() error {
	if k.stuckAt != "" {
		e := k.tryError("a driver call of replica %s for this machine ignores its deadline, and no other replica of provider %s has room: "+
			"restart that replica (its log has the stack) or add one", k.stuckAt, k.req.Provider)
		e.Code = driverv1.Code_CODE_ABORTED // other machines may still have room

		return e
	}
	if k.staleAt != "" {
		return k.noRoom("replica %s of provider %s refuses requests as stale, and no other replica has room: compare its clock with mcm's",
			k.staleAt, k.req.Provider)
	}

	if why := k.c.replicas.refusal(k.req.Provider); why != nil {
		return k.noRoom("no replica of provider %s that speaks mcm's protocol has room: %w", k.req.Provider, why)
	}

	return k.noRoom("all replicas of provider %s are busy", k.req.Provider)
}

// chooseTarget addresses a replica by name while another replica of the provider must
// get no work: that one would hear requests for any replica.
func (k *call) chooseTarget() error {
	if k.target != "" || k.c.replicas.refusal(k.req.Provider) == nil {
		return nil
	}

	return k.pickTarget()
}

// pickTarget addresses a replica that can take the operation by name.
func (k *call) pickTarget() error {
	k.target = k.c.replicas.pick(k.req.Provider, k.op, time.Now(), k.avoid)
	if k.target == "" {
		return k.allBusy()
	}

	return nil
}

func (k *call) noRoom(format string, args ...any) *bus.Error {
	e := k.tryError(format, args...)
	e.NoRoom = true

	return e
}

// tryError returns the error of a try that reached no driver. It proves that nothing
// ran, or changed, only if there was no earlier attempt.
func (k *call) tryError(format string, args ...any) *bus.Error {
	e := bus.NothingRanf(format, args...)
	if k.lastRan > 0 && (k.editsGroup || bus.Mutates(k.op)) {
		e.Origin = bus.OriginTimeout
	}

	return e
}
