package caller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A Request is one operation to be done.
type Request struct {
	// Provider is the driver's; Namespace and Name are the machine's or class's,
	// for the subject. Requests about node groups have neither.
	Provider, Namespace, Name string
	// OperationID is the same for every attempt at this operation, also across
	// managers, and never used for another.
	OperationID string
	// Body is an envelope with the operation's request; Call fills in the rest.
	Body *driverv1.Envelope
	// Timeout is how long one attempt may take; 0 means a minute.
	Timeout time.Duration
	// Recover says that an earlier Call for this operation may have had an
	// effect, Attempt how many attempts there were (Outcome.Attempts). Call then
	// looks for a replica that holds the operation before it tries again.
	Recover bool
	Attempt uint32
	// Until, with Recover, is until when those attempts may have an effect as far as
	// their deadlines go (Outcome.Until). Zero says that this is not known: then about
	// a Timeout from now on.
	Until time.Time
	// OnlyIfHeld, with Recover, begins nothing: when no replica holds the
	// operation any more, Call fails with NotFound.
	OnlyIfHeld bool
	// Look, with Recover, begins nothing either: it returns what a replica holds or the
	// operations stream has stored, waits as long as a further attempt has to, and
	// fails like OnlyIfHeld where that could begin.
	Look bool
	// TraceParent goes along with each attempt, for the driver's spans: a W3C
	// traceparent header, empty when the operation is not traced.
	TraceParent string
	// OnAccepted, OnProgress and OnWaiting are told what happens; they must not
	// block. May be nil. OnWaiting gets why Call waits before a further attempt, if
	// that may take long.
	OnAccepted func(attempt uint32, replica string)
	OnProgress func(message string)
	OnWaiting  func(attempts uint32, why error)
}

// An Outcome is what came of an operation.
type Outcome struct {
	// Result is the driver's, nil when none came.
	Result *driverv1.Result
	// Attempts is how many may have had an effect, those before this Call
	// included.
	Attempts uint32
	// Until is by when the deadlines of all of them are over.
	Until time.Time
	// Replica answered last; empty for a plain one.
	Replica string
	// Plain: answered by a driver that keeps no session.
	Plain bool
	// Partial: read from the operations stream, and the part of it that is sealed
	// could not be: texts and the driver's last known state are missing.
	Partial bool
	// Waited is the time until a replica took the operation, Took from there to
	// the end.
	Waited, Took time.Duration
}

// Call has an operation done and returns what came of it. The Outcome is never
// nil. The error is an [*Error] that says who failed:
//
//   - OriginDriver: a driver answered with this code; Outcome.Result holds its
//     payload.
//   - OriginBus: nothing ran. With the code Unavailable, no replica of the provider
//     took it, and [Caller.Room] tells when to try again; with Aborted, another
//     operation of the machine runs; with InvalidArgument, the request can never
//     be sent.
//   - OriginTimeout: a mutation may have run. Call again with Recover. Where a
//     replica said so, Outcome.Result is what it knows.
//
// A read whose replica dies is asked again. A mutation whose replica dies goes to
// another one, told to look first for what the dead one may have made; if nothing
// identifies a driver's Create, it waits for the dead replica's deadline before.
// When ctx ends Call returns its error and leaves the operation running.
//
// A request about node groups is a read, but goes to any replica and never to one by its
// name. One that changes a group and fails, or is not answered, after a replica may have
// had it has an unknown outcome: OriginTimeout.
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

// A call is the state of one Call: where its request goes, and what came of it.
type call struct {
	past

	c          *Caller
	req        *Request
	op         driverv1.Operation
	editsGroup bool // it changes a node group
	started    time.Time
	taken      time.Time // when a replica took the operation, the last time
	out        Outcome

	// Of the next try.
	number  uint32               // of the attempt
	recover bool                 // the replica must look first for what an earlier attempt has made
	doubted bool                 // an earlier one's call may still run, or have had its effect, when it begins
	target  string               // the replica; empty for any
	terms   *driverv1.ClaimTerms // of its claim; nil leaves them to the replica

	// Of the tries so far.
	lastTry, firstTry time.Time
	limit             time.Time       // of a read; zero for mutations
	sendErr           error           // why the last one was not sent
	avoid             map[string]bool // replicas that lost an attempt or have just refused one
	staleAt           string          // replica that took a request for stale
	stuckAt           string          // replica where a call for this machine ignores its deadline

	plainClaim   uint64    // the claim that this call has written for a plain driver; 0 for none
	plainClaimAt time.Time // just before it was
}

// log is for lines about the operation.
func (k *call) log() *slog.Logger {
	object := "machine"
	if bus.MachineOf(k.req.Body) == nil {
		object = "class"
	}

	return k.c.log.With(object, k.req.Namespace+"/"+k.req.Name, "operation", bus.Verb(k.op), "operation_id", k.req.OperationID,
		"provider", k.req.Provider, "attempt", k.number, "replica", k.out.Replica)
}

// noteMayHaveRun notes that the try just made may have an effect.
func (k *call) noteMayHaveRun() { k.noteAttempt(k.number, k.lastTry.Add(bus.AcceptBy+k.req.Timeout)) }

// noteEarlierAttempt notes that there was an attempt of this number, made by another caller, or
// before, at a time not known.
func (k *call) noteEarlierAttempt(attempt uint32) {
	k.noteAttempt(attempt, time.Now().Add(bus.AcceptBy+k.req.Timeout))
}

// prepareAttempt notes that the try about to be made may begin a new attempt.
func (k *call) prepareAttempt() {
	k.doubted = false
	if k.number <= k.lastRan { // else it only asks who has one what comes of it
		return
	}
	k.noteSent(k.number)
	switch {
	case k.lastRan == 0:
	case k.op == driverv1.Operation_OPERATION_CREATE:
		_, settle := k.c.replicas.identity(k.req.Provider)
		k.doubted = !k.nothingBegun && k.lastTry.Before(k.lastDeadline().Add(settle)) ||
			k.c.replicas.stuckAt(k.req.Provider, k.req.OperationID) != ""
	default:
		// What it finds may be what the earlier one has done, or is doing.
		k.doubted = k.editsGroup
		k.recover = k.recover || k.editsGroup
	}
}

// reportWaiting tells why nothing happens for what may be long.
func (k *call) reportWaiting(why *bus.Error) {
	k.log().Info("waiting", "why", why)
	if k.req.OnWaiting != nil {
		k.req.OnWaiting(k.lastRan, why)
	}
}

// A verdict is how one try ended.
type verdict int

const (
	gotResult       verdict = iota
	gotBusy                 // refused, nothing ran
	gotNoResponder          // nobody listens, nothing ran
	gotNotConnected         // not sent, nothing ran
	gotUnsendable           // will never be sent, nothing ran
	gotSilence              // no frame at all: unknown
	gotHolderDied           // the holder died: unknown
	gotDenial               // the holder says that it does not have it: nothing runs there
	gotOverdue              // the holder lives, but the operation's time is over
	gotContextEnd           // the caller's context ended
)

// sendAndFollow sends the request once and follows it as far as a verdict.
func (k *call) sendAndFollow(ctx context.Context) (verdict, *driverv1.Result, driverv1.BusyReason) {
	const none = driverv1.BusyReason_BUSY_REASON_UNSPECIFIED
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
		return k.verdictOfSendError(err), nil, none
	}
	f := follow{k: k, a: a, timer: k.c.timers.start(k.limitToRead(acceptTimeout)), unbind: func() {}}
	defer func() { k.c.timers.stop(f.timer); f.unbind() }()
	v, busy := f.run(ctx)
	k.out.Replica = f.state.holder
	if v == gotBusy {
		k.out.Replica = f.state.busyAt
	}
	if k.out.Replica != "" && bus.Mutates(k.op) {
		k.c.replicas.noteTrust(k.req.Provider, k.out.Replica, answers)
	}

	return v, f.state.result, busy
}

// limitToRead cuts d to what is left of a read's time; a context of its own for that
// would cost each read a twentieth of its round trip.
func (k *call) limitToRead(d time.Duration) time.Duration {
	if k.limit.IsZero() {
		return d
	}

	return min(d, max(0, time.Until(k.limit)))
}

// readTimedOut tells that a read's time is over.
func (k *call) readTimedOut() bool { return !k.limit.IsZero() && !time.Now().Before(k.limit) }

// verdictOfSendError tells an outage from a request that can never be sent.
func (k *call) verdictOfSendError(err error) verdict {
	k.sendErr = err
	if errors.Is(err, bus.ErrSubject) || errors.Is(err, bus.ErrEncode) || errors.Is(err, bus.ErrTooLarge) {
		return gotUnsendable
	}

	return gotNotConnected
}

// send publishes the request, with a's reply subject listened to first: a reply
// may come before publish returns.
func (k *call) send(a *attempt) (unregister func(), err error) {
	k.lastTry = time.Now()
	if k.firstTry.IsZero() {
		k.firstTry = k.lastTry
	}
	subject, err := k.subject(a.tree, a.target)
	if err != nil {
		return func() {}, err
	}
	reply, unregister := k.c.register(k.req.Provider, k.listener(a))
	k.prepareAttempt()
	err = k.c.publish(subject, reply, k.req.TraceParent, k.envelope(a.tree, time.Now()))
	if err != nil {
		k.log().Debug("request not sent", "err", err)
	}

	return unregister, err
}

// subject is where the request goes; replica is empty for any.
func (k *call) subject(tree bus.Tree, replica string) (string, error) {
	return bus.Subject{
		Cluster: k.c.cfg.Cluster, Tree: tree, Provider: k.req.Provider, Replica: replica,
		Verb: bus.RequestVerb(k.req.Body), Namespace: k.req.Namespace, Name: k.req.Name,
	}.Build()
}

// Envelope is what the request says at this try.
func (k *call) envelope(tree bus.Tree, now time.Time) *driverv1.Envelope {
	env := &driverv1.Envelope{
		OperationId: k.req.OperationID, Attempt: k.number, Epoch: k.c.cfg.Epoch(), Owner: k.c.cfg.Owner, Recover: k.recover, EarlierMayRun: k.doubted && !k.editsGroup,
		AcceptBy: timestamppb.New(k.acceptBy(tree, now)), Timeout: durationpb.New(k.req.Timeout),
		Body: k.req.Body.GetBody(),
	}
	if bus.Mutates(k.op) && tree != bus.TreePlain {
		env.ClaimTerms = &driverv1.ClaimTerms{StreamMade: k.c.streams.madeAt(k.req.Provider)}
		if k.terms != nil {
			env.ClaimTerms.Sequence = k.terms.Sequence
		}
	}

	return env
}

// acceptBy is until when a request that is sent now may be taken. A plain driver's is
// counted from its claim: who was frozen since may have been replaced.
func (k *call) acceptBy(tree bus.Tree, now time.Time) time.Time {
	if tree == bus.TreePlain && k.plainClaim != 0 {
		now = k.plainClaimAt
	}

	return now.Add(bus.AcceptBy)
}

// read has an operation done that may be asked any number of times.
func (k *call) read(ctx context.Context) error {
	k.limit = k.started.Add(k.req.Timeout)
	for {
		if err := k.chooseTarget(); err != nil {
			return err
		}
		v, result, _ := k.sendAndFollow(ctx)
		switch v {
		case gotResult:
			return k.endWithResult(result)
		case gotNotConnected:
			return k.notConnected()
		case gotUnsendable:
			return k.unsendable()
		case gotNoResponder:
			if k.target == "" {
				return newPlainCall(k).read(ctx)
			}
			k.avoidReplica(k.target) // left since its last session
			k.target = ""
		case gotBusy:
			if done, err := k.retryAtOtherReplica(); done {
				return err
			}
		case gotContextEnd:
			return ctx.Err() //nolint:wrapcheck // the caller's own
		case gotOverdue:
			return k.noAnswer()
		case gotSilence, gotHolderDied, gotDenial:
			k.number++
			k.target = ""
			if v == gotSilence && len(k.c.replicas.live(k.req.Provider)) == 0 {
				return newPlainCall(k).read(ctx) // a wiretap on requests hides that nobody listens
			}
		}
	}
}

// readGroups is read for node groups. Any replica may answer, and plain drivers have none.
// Who asks may be allowed no other subjects, so no replica is asked by its name.
func (k *call) readGroups(ctx context.Context) error {
	k.limit = k.started.Add(k.req.Timeout)
	for ; ; k.number++ {
		v, result, busy := k.sendAndFollow(ctx)
		switch v {
		case gotResult:
			return k.endWithResult(result)
		case gotNotConnected:
			return k.notConnected()
		case gotUnsendable:
			return k.unsendable()
		case gotNoResponder:
			return k.notStarted("no replica of provider %s that serves node groups is on the bus", k.req.Provider)
		case gotBusy:
			if busy == driverv1.BusyReason_BUSY_REASON_STALE {
				k.staleAt = k.out.Replica
			}

			return k.allBusy()
		case gotContextEnd:
			if k.editsGroup {
				return bus.OutcomeUnknownf("no answer from the driver of provider %s in time: %w", k.req.Provider, ctx.Err())
			}

			return ctx.Err() //nolint:wrapcheck // the caller's own
		case gotOverdue:
			return k.noAnswer()
		case gotSilence, gotHolderDied, gotDenial:
			if k.editsGroup {
				k.noteMayHaveRun() // for all that is known
			}
		}
	}
}

func (k *call) noAnswer() error {
	return bus.OutcomeUnknownf("no answer from the driver of provider %s within %s", k.req.Provider, k.req.Timeout)
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
	case !ok:
	case !result.GetOutcomeUnknown() && !k.doubted:
	case own || !k.doubted:
		failure.Origin = bus.OriginTimeout // the replica itself does not know
	case k.editsGroup:
		failure.Origin = bus.OriginTimeout
		failure.Err = fmt.Errorf("%w (retried: an earlier attempt may have done it)", failure.Err)
	default: // whether or not a plain driver has heard of that
		failure.Origin = bus.OriginTimeout
		failure.Err = fmt.Errorf("%w (retried: the call of an earlier attempt may still make the instance)", failure.Err)
	}

	return err
}

func (k *call) notConnected() error {
	return k.notStarted("not connected to NATS; waiting for the connection")
}

func (k *call) unsendable() error {
	e := k.notStarted("the request cannot be sent: %w", k.sendErr)
	e.Code = driverv1.Code_CODE_INVALID_ARGUMENT

	return e
}

func (k *call) allBusy() error {
	if k.stuckAt != "" {
		e := k.notStarted("a driver call of replica %s for this machine ignores its deadline, and no other replica of provider %s has room: "+
			"restart that replica (its log has the stack) or add one", k.stuckAt, k.req.Provider)
		e.Code = driverv1.Code_CODE_ABORTED // room for others there may be

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

// chooseTarget has the request go to a replica by its name while another one of the
// provider's is to be asked for nothing, but hears what is for any.
func (k *call) chooseTarget() error {
	if k.target != "" || k.c.replicas.refusal(k.req.Provider) == nil {
		return nil
	}
	k.target = k.c.replicas.pick(k.req.Provider, k.op, time.Now(), k.avoid)
	if k.target == "" {
		return k.allBusy()
	}

	return nil
}

func (k *call) noRoom(format string, args ...any) *bus.Error {
	e := k.notStarted(format, args...)
	e.NoRoom = true

	return e
}

// notStarted is the error for a try that reached nobody. It is proof that
// nothing ran, or was changed, only if no earlier attempt may have.
func (k *call) notStarted(format string, args ...any) *bus.Error {
	e := bus.NothingRanf(format, args...)
	if k.lastRan > 0 && (k.editsGroup || bus.Mutates(k.op)) {
		e.Origin = bus.OriginTimeout
	}

	return e
}
