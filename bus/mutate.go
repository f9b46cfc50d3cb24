package bus

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// claimLooks bounds how often a call looks at the claim on its machine before it
	// gives up for a while.
	claimLooks = 5
	// findMost bounds how many replicas are asked who holds an operation.
	findMost = 64
	// maxTries bounds the tries of one Call: more means that something refuses
	// or dies again and again, which its caller should get to know.
	maxTries = 100
	// askAgain is the time between looks for a replica that may come back.
	askAgain = SessionInterval / 2
	// storeTries is how many of these a call waits for the operations stream.
	storeTries = 8
)

// mutate has an operation done that must not be done twice.
func (k *call) mutate(ctx context.Context) error {
	if done, err := k.arrange(ctx); done {
		return err
	}
	if k.again {
		if done, err := k.resume(ctx); done {
			return err
		}
	} else if done, err := k.open(ctx); done {
		return err
	}
	for range maxTries {
		if k.target == "" && k.c.replicas.full(k.req.Provider, k.op) {
			return k.allBusy()
		}
		if err := k.choose(); err != nil {
			return err
		}
		v, result, busy := k.try(ctx)
		if v == gotResult {
			return k.settle(result)
		}
		if done, err := k.after(ctx, v, busy); done {
			return err
		}
	}

	return k.notStarted("gave up after %d tries at replicas of provider %s; see their logs", maxTries, k.req.Provider)
}

// after decides what follows a try without a result: another one, when done is
// false, for which it has chosen number and target.
func (k *call) after(ctx context.Context, v verdict, busy driverv1.BusyReason) (done bool, err error) {
	switch v {
	case gotDown:
		return true, k.down()
	case gotUnsendable:
		return true, k.unsendable()
	case gotNobody:
		switch {
		case k.target == "":
			return true, k.plain(ctx)
		case k.attached():
			return k.missing(ctx)
		default:
			k.shun(k.target) // left since its last session

			return k.elsewhere()
		}
	case gotBusy:
		return k.onBusy(ctx, busy)
	case gotSilence:
		k.hasRun()

		return k.find(ctx)
	case gotDeath:
		k.log().Warn("replica died with an operation")
		k.shun(k.out.Replica)

		return k.next(ctx) // the claim tells whether it has begun anything
	case gotDenial:
		k.denies(k.out.Replica, k.number)

		return k.next(ctx)
	case gotLate:
		return true, k.late()
	default:
		return true, ctx.Err() //nolint:wrapcheck // the caller's own
	}
}

// onBusy goes on after a refusal.
func (k *call) onBusy(ctx context.Context, why driverv1.BusyReason) (done bool, err error) {
	switch {
	case why == driverv1.BusyReason_BUSY_REASON_MACHINE:
		e := k.notStarted("another operation of this machine still runs at replica %s", k.out.Replica)
		e.Code = driverv1.Code_CODE_ABORTED // room for others there may be

		return true, e
	case why == driverv1.BusyReason_BUSY_REASON_STALE:
		return k.onStale(ctx)
	case k.attached():
		k.denies(k.out.Replica, k.number)

		return k.next(ctx) // it would have answered with what it holds
	case why == driverv1.BusyReason_BUSY_REASON_STUCK:
		k.stuckAt = k.out.Replica

		return k.elsewhere()
	case why == driverv1.BusyReason_BUSY_REASON_STORE:
		return k.awaitStore(ctx)
	case why == driverv1.BusyReason_BUSY_REASON_CLAIM:
		return k.onClaim(ctx)
	default:
		return k.elsewhere()
	}
}

// onStale goes on after a replica has taken a request for an old one: the bus was
// slow, or one of two clocks is wrong.
func (k *call) onStale(ctx context.Context) (done bool, err error) {
	k.log().Warn("a replica says that a request came too late; if it says so of all of them, compare its machine's clock with this one's")
	if !k.attached() {
		k.behind = k.out.Replica

		return k.elsewhere()
	}
	// It has not said whether it holds the attempt.
	answer := k.c.ask(ctx, k.req.Provider, k.out.Replica, k.req.OperationID, k.number)
	switch {
	case ctx.Err() != nil:
		return true, ctx.Err() //nolint:wrapcheck // the caller's own
	case answer != nil && !holds(answer):
		k.denies(k.out.Replica, k.number)

		return k.next(ctx)
	case answer.GetResult() != nil:
		return true, k.settle(answer.GetResult())
	default:
		return true, k.notStarted("replica %s may have the operation and takes requests for stale: compare its clock with mcm's", k.out.Replica)
	}
}

// attached tells that the try went to a replica believed to hold this very
// attempt: that nobody was reached does not mean that nothing runs.
func (k *call) attached() bool { return k.target != "" && k.ran >= k.number }

func (k *call) shun(replica string) {
	if k.avoid == nil {
		k.avoid = map[string]bool{}
	}
	k.avoid[replica] = true
}

// missing waits for the believed holder, which has lost its connection, to come
// back or to be dead.
func (k *call) missing(ctx context.Context) (done bool, err error) {
	if !slices.Contains(k.c.replicas.live(k.req.Provider), k.target) {
		k.shun(k.target)

		return k.next(ctx)
	}

	return k.pause(ctx)
}

// pause passes the time until the replicas are looked at again.
func (k *call) pause(ctx context.Context) (done bool, err error) {
	err = sleep(ctx, askAgain)

	return err != nil, err
}

// elsewhere sends the same attempt, which nobody took, to a replica with room.
func (k *call) elsewhere() (done bool, err error) {
	if k.out.Replica != "" {
		k.shun(k.out.Replica) // its sessions may not say yet that it is full
	}
	k.target = k.c.replicas.pick(k.req.Provider, k.op, time.Now(), k.avoid)
	if k.target == "" {
		return true, k.allBusy()
	}

	return false, nil
}

// awaitStore gives an operations stream that has only just been made, or that chooses
// another leader, the time to take claims.
func (k *call) awaitStore(ctx context.Context) (done bool, err error) {
	k.c.lost(k.req.Provider, errNoAnswer)
	for k.unstored < storeTries {
		k.unstored++
		if err := sleep(ctx, askAgain); err != nil {
			return true, err
		}
		if k.target = k.c.replicas.pick(k.req.Provider, k.op, time.Now(), k.avoid); k.target != "" {
			return false, nil
		}
	}

	return true, k.notStarted("the operations stream %s does not take claims from replicas of provider %s: see the log of mcm and of NATS",
		StreamName(k.c.cfg.Cluster, k.req.Provider), k.req.Provider)
}

// next makes a further attempt after one that may have had an effect, unless that
// turns out to run still or to have ended.
func (k *call) next(ctx context.Context) (done bool, err error) {
	switch d, err := k.consult(ctx); d {
	case isDone:
		return true, err
	case mayAttach:
		return false, nil
	default:
		return k.attempt(ctx)
	}
}

// attempt chooses who makes the next attempt.
func (k *call) attempt(ctx context.Context) (done bool, err error) {
	if k.req.OnlyIfHeld {
		return true, k.nobodyHas()
	}
	if back, err := k.waitForIdentity(ctx); back || err != nil {
		return err != nil, err
	}
	if k.req.Look {
		return true, k.nobodyHas()
	}
	k.number, k.again = k.ran+1, true
	k.target = k.c.replicas.pick(k.req.Provider, k.op, time.Now(), k.avoid)
	if k.target == "" && k.c.replicas.unable(k.req.Provider, k.op) {
		return true, Errorf(driverv1.Code_CODE_UNIMPLEMENTED, "no replica of provider %s implements %s", k.req.Provider, Verb(k.op))
	}
	if k.target == "" {
		return true, k.noRoom("no replica of provider %s has room for a further attempt", k.req.Provider)
	}

	return false, nil
}

// ErrNotHeld is wrapped by the error of a Call with OnlyIfHeld or Look when no replica
// holds the operation, and its outcome is not stored. An attempt that has begun may still
// take effect until its deadline; none begins any more once its claim is replaced.
var ErrNotHeld = errors.New("the outcome of the operation is not known")

func (k *call) nobodyHas() error {
	return Errorf(driverv1.Code_CODE_NOT_FOUND, "%w: no replica of provider %s has it, and the operations stream has no result", ErrNotHeld, k.req.Provider)
}

// waitForIdentity waits, for a create that nothing tells apart from a lost one, until
// the lost one's call cannot take effect unseen any more, or until its replica is back
// with it.
func (k *call) waitForIdentity(ctx context.Context) (back bool, err error) {
	if k.op != driverv1.Operation_OPERATION_CREATE {
		return false, nil
	}
	for said := ""; ; {
		why := k.mayMakeTwo(time.Now())
		if why == nil {
			return false, nil
		}
		if text := why.Error(); text != said {
			said = text
			k.waits(why)
		}
		if _, err := k.pause(ctx); err != nil {
			return false, err
		}
		if k.held() {
			return true, nil
		}
	}
}

// mayMakeTwo returns why a further attempt at a create could make a second instance
// unseen; nil if it cannot.
func (k *call) mayMakeTwo(now time.Time) *Error {
	identified, settle := k.c.replicas.identity(k.req.Provider)
	earlier, lost := k.earlierCreate.Add(settle), k.quietAt().Add(settle)
	stuck := k.c.replicas.stuckAt(k.req.Provider, k.req.OperationID)
	switch {
	case !k.earlierCreate.IsZero() && now.Before(earlier):
		return k.notStarted("a create of an earlier operation of this machine was lost, and no cloud tells the two apart: "+
			"its deadline and the settle time come first, at %s", earlier.UTC().Format(time.RFC3339))
	case identified:
		return nil
	case stuck != "":
		return k.notStarted("creates of provider %s have no identity, and one for this machine ignores its deadline at replica %s: "+
			"restart that replica, or it may make a second instance", k.req.Provider, stuck)
	case !k.unclaimed && now.Before(lost):
		return k.notStarted("creates of provider %s have no identity: the lost attempt's deadline and the settle time come first, at %s",
			k.req.Provider, lost.UTC().Format(time.RFC3339))
	default:
		return nil
	}
}

// holder has the next try go to who has an attempt.
func (k *call) holder(replica string, attempt uint32) {
	k.learns(attempt)
	k.target, k.number, k.terms = replica, attempt, nil
}

// held makes the replica that lists the operation the next target.
func (k *call) held() bool {
	h, ok := k.c.replicas.holding(k.req.Provider, k.req.OperationID)
	switch {
	case !ok, h.fenced: // the claim knows better
		return false
	}
	k.holder(h.replica, max(1, h.attempt))

	return true
}

// find looks for the replica that took a request without its frames reaching us. One
// round of questions is enough: who has not answered has not begun anything, or its
// claim will tell.
func (k *call) find(ctx context.Context) (done bool, err error) {
	asked := k.c.replicas.live(k.req.Provider)
	asked = asked[:min(len(asked), findMost)]
	if len(asked) == 0 {
		return true, k.plain(ctx) // a wiretap hid that nobody listens, or the claim tells
	}
	for i, answer := range k.askAll(ctx, asked) {
		switch {
		case answer == nil:
		case holds(answer):
			k.target, k.terms = asked[i], nil // it attaches us to what it runs

			return false, nil
		default:
			k.denies(asked[i], k.number)
		}
	}
	if ctx.Err() != nil {
		return true, ctx.Err() //nolint:wrapcheck // the caller's own
	}

	return k.next(ctx)
}

// askAll asks replicas about the call's attempt, all at once. Who has not answered
// in time has a nil.
func (k *call) askAll(ctx context.Context, replicas []string) []*driverv1.OpsResponse {
	said := make([]*driverv1.OpsResponse, len(replicas))
	var all sync.WaitGroup
	for i, id := range replicas {
		all.Go(func() { said[i] = k.c.ask(ctx, k.req.Provider, id, k.req.OperationID, k.number) })
	}
	all.Wait()

	return said
}

// holds reports whether a replica has the operation by its own answer. An attempt that is
// fenced does not count: another one may run in its place, and its result is the one that
// will be stored.
func holds(answer *driverv1.OpsResponse) bool {
	for _, st := range answer.GetOperations() {
		if !st.GetFenced() {
			return true
		}
	}

	return false
}

// resume looks, before an operation is tried again, for the replica that holds
// it, once every live replica has had the time to say what it holds.
func (k *call) resume(ctx context.Context) (done bool, err error) {
	if !k.c.conn.Up() {
		return true, k.down() // nobody can be heard
	}
	warm := time.NewTimer(time.Until(k.c.hears().Add(deathLimit)))
	defer warm.Stop()
	select {
	case <-warm.C:
	case <-ctx.Done():
		return true, ctx.Err() //nolint:wrapcheck // the caller's own
	}
	if k.held() {
		return false, nil
	}

	return k.recall(ctx)
}

// late ends an operation whose holder lives but does not finish.
func (k *call) late() error {
	err := k.c.control(k.req.Provider, k.out.Replica, verbCancel, &driverv1.Envelope{
		OperationId: k.req.OperationID,
		Body:        &driverv1.Envelope_Cancel{Cancel: &driverv1.Cancel{OperationId: k.req.OperationID}},
	})
	if err != nil {
		k.log().Warn("late operation not cancelled", "err", err)
	}

	return timeoutErrorf("replica %s did not finish within %s", k.out.Replica, k.req.Timeout)
}

// recall takes up an operation that no replica lists: its claim tells what became
// of it.
func (k *call) recall(ctx context.Context) (done bool, err error) {
	switch d, err := k.consult(ctx); d {
	case isDone:
		return true, err
	case mayAttach:
		return false, nil
	default:
	}
	if !k.req.OnlyIfHeld && len(k.c.replicas.live(k.req.Provider)) == 0 {
		return true, k.plain(ctx)
	}

	return k.attempt(ctx)
}
