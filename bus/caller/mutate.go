package caller

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/opstream"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// claimLooks bounds how often a call looks at the claim on its machine before it
	// gives up for a while.
	maxClaimReads = 5
	// findMost bounds how many replicas are asked who holds an operation.
	maxAsked = 64
	// maxTries bounds the tries of one Call: more means that something refuses
	// or dies again and again, which its caller should get to know.
	maxTries = 100
	// askAgain is the time between looks for a replica that may come back.
	recheckInterval = bus.SessionInterval / 2
	// storeTries is how many of these a call waits for the operations stream.
	maxStoreTries = 8
)

// A mutation is a call that must have its operation done once, whatever dies meanwhile.
type mutation struct {
	claimReader

	storeRefusals int // times that a replica could not write its claim
}

func newMutation(k *call) *mutation { return &mutation{claimReader: claimReader{call: k}} }

// mutate has an operation done that must not be done twice.
func (m *mutation) mutate(ctx context.Context) error {
	if done, err := m.prepareClaim(ctx); done {
		return err
	}
	if m.recover {
		if done, err := m.resume(ctx); done {
			return err
		}
	} else if done, err := m.readFirstClaim(ctx); done {
		return err
	}
	for range maxTries {
		if m.target == "" && m.c.replicas.allFull(m.req.Provider, m.op) {
			return m.allBusy()
		}
		if err := m.chooseTarget(); err != nil {
			return err
		}
		v, result, busy := m.sendAndFollow(ctx)
		if v == gotResult {
			return m.endWithResult(result)
		}
		if done, err := m.handleVerdict(ctx, v, busy); done {
			return err
		}
	}

	return m.notStarted("gave up after %d tries at replicas of provider %s; see their logs", maxTries, m.req.Provider)
}

// handleVerdict decides what follows a try without a result: another one, when done is
// false, for which it has chosen number and target.
func (m *mutation) handleVerdict(ctx context.Context, v verdict, busy driverv1.BusyReason) (done bool, err error) {
	switch v {
	case gotNotConnected:
		return true, m.notConnected()
	case gotUnsendable:
		return true, m.unsendable()
	case gotNoResponder:
		switch {
		case m.target == "":
			return true, (&plainCall{claimReader: m.claimReader}).mutate(ctx)
		case m.attached():
			return m.awaitHolder(ctx)
		default:
			m.avoidReplica(m.target) // left since its last session

			return m.retryAtOtherReplica()
		}
	case gotBusy:
		return m.onBusy(ctx, busy)
	case gotSilence:
		m.noteMayHaveRun()

		return m.findHolder(ctx)
	case gotHolderDied:
		m.log().Warn("the replica that ran the operation died")
		m.avoidReplica(m.out.Replica)

		return m.retry(ctx) // the claim tells whether it has begun anything
	case gotDenial:
		m.noteDenial(m.out.Replica, m.number)

		return m.retry(ctx)
	case gotOverdue:
		return true, m.endOverdue()
	default:
		return true, ctx.Err() //nolint:wrapcheck // the caller's own
	}
}

// onBusy goes on after a refusal.
func (m *mutation) onBusy(ctx context.Context, why driverv1.BusyReason) (done bool, err error) {
	switch {
	case why == driverv1.BusyReason_BUSY_REASON_MACHINE:
		e := m.notStarted("replica %s still runs another operation of this machine", m.out.Replica)
		e.Code = driverv1.Code_CODE_ABORTED // room for others there may be

		return true, e
	case why == driverv1.BusyReason_BUSY_REASON_STALE:
		return m.onStale(ctx)
	case m.attached():
		m.noteDenial(m.out.Replica, m.number)

		return m.retry(ctx) // it would have answered with what it holds
	case why == driverv1.BusyReason_BUSY_REASON_STUCK:
		m.stuckAt = m.out.Replica

		return m.retryAtOtherReplica()
	case why == driverv1.BusyReason_BUSY_REASON_STORE:
		return m.awaitStore(ctx)
	case why == driverv1.BusyReason_BUSY_REASON_CLAIM:
		return m.onClaim(ctx)
	default:
		return m.retryAtOtherReplica()
	}
}

// onStale goes on after a replica has taken a request for an old one: the bus was
// slow, or one of two clocks is wrong.
func (m *mutation) onStale(ctx context.Context) (done bool, err error) {
	m.log().Warn("a replica refused a request as stale; if this repeats, compare the clock of its machine with the clock of this one")
	if !m.attached() {
		m.staleAt = m.out.Replica

		return m.retryAtOtherReplica()
	}
	// It has not said whether it holds the attempt.
	answer := m.c.ask(ctx, m.req.Provider, m.out.Replica, m.req.OperationID, m.number)
	switch {
	case ctx.Err() != nil:
		return true, ctx.Err() //nolint:wrapcheck // the caller's own
	case answer != nil && !holdsOperation(answer):
		m.noteDenial(m.out.Replica, m.number)

		return m.retry(ctx)
	case answer.GetResult() != nil:
		return true, m.endWithResult(answer.GetResult())
	default:
		return true, m.notStarted("replica %s may have the operation, but refuses requests as stale: compare its clock with mcm's", m.out.Replica)
	}
}

// attached tells that the try went to a replica believed to hold this very
// attempt: that nobody was reached does not mean that nothing runs.
func (m *mutation) attached() bool { return m.target != "" && m.lastRan >= m.number }

func (k *call) avoidReplica(replica string) {
	if k.avoid == nil {
		k.avoid = map[string]bool{}
	}
	k.avoid[replica] = true
}

// awaitHolder waits for the believed holder, which has lost its connection, to come
// back or to be dead.
func (m *mutation) awaitHolder(ctx context.Context) (done bool, err error) {
	if !slices.Contains(m.c.replicas.live(m.req.Provider), m.target) {
		m.avoidReplica(m.target)

		return m.retry(ctx)
	}

	return m.pause(ctx)
}

// pause passes the time until the replicas are looked at again.
func (m *mutation) pause(ctx context.Context) (done bool, err error) {
	err = sleep(ctx, recheckInterval)

	return err != nil, err
}

// retryAtOtherReplica sends the same attempt, which nobody took, to a replica with room.
func (k *call) retryAtOtherReplica() (done bool, err error) {
	if k.out.Replica != "" {
		k.avoidReplica(k.out.Replica) // its sessions may not say yet that it is full
	}
	k.target = k.c.replicas.pick(k.req.Provider, k.op, time.Now(), k.avoid)
	if k.target == "" {
		return true, k.allBusy()
	}

	return false, nil
}

// awaitStore gives an operations stream that has only just been made, or that chooses
// another leader, the time to take claims.
func (m *mutation) awaitStore(ctx context.Context) (done bool, err error) {
	m.c.recheckStream(m.req.Provider, opstream.ErrNoAnswer)
	for m.storeRefusals < maxStoreTries {
		m.storeRefusals++
		if err := sleep(ctx, recheckInterval); err != nil {
			return true, err
		}
		if m.target = m.c.replicas.pick(m.req.Provider, m.op, time.Now(), m.avoid); m.target != "" {
			return false, nil
		}
	}

	return true, m.notStarted("the operations stream %s takes no claims from replicas of provider %s: see the logs of mcm and NATS",
		bus.StreamName(m.c.cfg.Cluster, m.req.Provider), m.req.Provider)
}

// retry makes a further attempt after one that may have had an effect, unless that
// turns out to run still or to have ended.
func (m *mutation) retry(ctx context.Context) (done bool, err error) {
	switch d, err := m.checkClaim(ctx); d {
	case isDone:
		return true, err
	case mayAttach:
		return false, nil
	default:
		return m.chooseRetryTarget(ctx)
	}
}

// chooseRetryTarget chooses who makes the next attempt.
func (m *mutation) chooseRetryTarget(ctx context.Context) (done bool, err error) {
	if m.req.OnlyIfHeld {
		return true, m.notHeld()
	}
	if back, err := m.waitForIdentity(ctx); back || err != nil {
		return err != nil, err
	}
	if m.req.Look {
		return true, m.notHeld()
	}
	m.number, m.recover = m.lastRan+1, true
	m.target = m.c.replicas.pick(m.req.Provider, m.op, time.Now(), m.avoid)
	if m.target == "" && m.c.replicas.noneImplements(m.req.Provider, m.op) {
		return true, bus.Errorf(driverv1.Code_CODE_UNIMPLEMENTED, "no replica of provider %s implements %s", m.req.Provider, bus.Verb(m.op))
	}
	if m.target == "" {
		return true, m.noRoom("no replica of provider %s has room for a further attempt", m.req.Provider)
	}

	return false, nil
}

// ErrNotHeld is wrapped by the error of a Call with OnlyIfHeld or Look when no replica
// holds the operation, and its outcome is not stored. An attempt that has begun may still
// take effect until its deadline; none begins any more once its claim is replaced.
var ErrNotHeld = errors.New("the outcome of the operation is not known")

func (k *call) notHeld() error {
	return bus.Errorf(driverv1.Code_CODE_NOT_FOUND, "%w: no replica of provider %s has the operation, and the operations stream has no result", ErrNotHeld, k.req.Provider)
}

// waitForIdentity waits, for a create that nothing tells apart from a lost one, until
// the lost one's call cannot take effect unseen any more, or until its replica is back
// with it.
func (m *mutation) waitForIdentity(ctx context.Context) (back bool, err error) {
	if m.op != driverv1.Operation_OPERATION_CREATE {
		return false, nil
	}
	for said := ""; ; {
		why := m.mayMakeTwo(time.Now())
		if why == nil {
			return false, nil
		}
		if text := why.Error(); text != said {
			said = text
			m.reportWaiting(why)
		}
		if _, err := m.pause(ctx); err != nil {
			return false, err
		}
		if m.targetHolder() {
			return true, nil
		}
	}
}

// mayMakeTwo returns why a further attempt at a create could make a second instance
// unseen; nil if it cannot.
func (m *mutation) mayMakeTwo(now time.Time) *bus.Error {
	identified, settle := m.c.replicas.identity(m.req.Provider)
	earlier, lost := m.earlierCreate.Add(settle), m.lastDeadline().Add(settle)
	stuck := m.c.replicas.stuckAt(m.req.Provider, m.req.OperationID)
	switch {
	case !m.earlierCreate.IsZero() && now.Before(earlier):
		return m.notStarted("an earlier operation of this machine lost a create, and the cloud cannot tell that create from this one: "+
			"waiting for the deadline of the lost create and the settle time, until %s", earlier.UTC().Format(time.RFC3339))
	case identified:
		return nil
	case stuck != "":
		return m.notStarted("creates of provider %s have no identity, and a create for this machine ignores its deadline at replica %s: "+
			"restart that replica; a further create could make a second instance", m.req.Provider, stuck)
	case !m.nothingBegun && now.Before(lost):
		return m.notStarted("creates of provider %s have no identity: waiting for the deadline of the lost attempt and the settle time, until %s",
			m.req.Provider, lost.UTC().Format(time.RFC3339))
	default:
		return nil
	}
}

// targetReplica has the next try go to who has an attempt.
func (r *claimReader) targetReplica(replica string, attempt uint32) {
	r.noteEarlierAttempt(attempt)
	r.target, r.number, r.terms = replica, attempt, nil
}

// targetHolder makes the replica that lists the operation the next target.
func (m *mutation) targetHolder() bool {
	h, ok := m.c.replicas.holderOf(m.req.Provider, m.req.OperationID)
	switch {
	case !ok, h.fenced: // the claim knows better
		return false
	}
	m.targetReplica(h.replica, max(1, h.attempt))

	return true
}

// findHolder looks for the replica that took a request without its frames reaching us. One
// round of questions is enough: who has not answered has not begun anything, or its
// claim will tell.
func (m *mutation) findHolder(ctx context.Context) (done bool, err error) {
	asked := m.c.replicas.live(m.req.Provider)
	asked = asked[:min(len(asked), maxAsked)]
	if len(asked) == 0 {
		return true, (&plainCall{claimReader: m.claimReader}).mutate(ctx) // a wiretap hid that nobody listens, or the claim tells
	}
	for i, answer := range m.askAll(ctx, asked) {
		switch {
		case answer == nil:
		case holdsOperation(answer):
			m.target, m.terms = asked[i], nil // it attaches us to what it runs

			return false, nil
		default:
			m.noteDenial(asked[i], m.number)
		}
	}
	if ctx.Err() != nil {
		return true, ctx.Err() //nolint:wrapcheck // the caller's own
	}

	return m.retry(ctx)
}

// askAll asks replicas about the call's attempt, all at once. Who has not answered
// in time has a nil.
func (m *mutation) askAll(ctx context.Context, replicas []string) []*driverv1.OpsResponse {
	said := make([]*driverv1.OpsResponse, len(replicas))
	var all sync.WaitGroup
	for i, id := range replicas {
		all.Go(func() { said[i] = m.c.ask(ctx, m.req.Provider, id, m.req.OperationID, m.number) })
	}
	all.Wait()

	return said
}

// holdsOperation reports whether a replica has the operation by its own answer. An attempt that is
// fenced does not count: another one may run in its place, and its result is the one that
// will be stored.
func holdsOperation(answer *driverv1.OpsResponse) bool {
	for _, st := range answer.GetOperations() {
		if !st.GetFenced() {
			return true
		}
	}

	return false
}

// resume looks, before an operation is tried again, for the replica that holds
// it, once every live replica has had the time to say what it holds.
func (m *mutation) resume(ctx context.Context) (done bool, err error) {
	if !m.c.conn.Up() {
		return true, m.notConnected() // nobody can be heard
	}
	warm := time.NewTimer(time.Until(m.c.connectedSince().Add(deathLimit)))
	defer warm.Stop()
	select {
	case <-warm.C:
	case <-ctx.Done():
		return true, ctx.Err() //nolint:wrapcheck // the caller's own
	}
	if m.targetHolder() {
		return false, nil
	}

	return m.resumeFromClaim(ctx)
}

// endOverdue ends an operation whose holder lives but does not finish.
func (k *call) endOverdue() error {
	err := k.c.control(k.req.Provider, k.out.Replica, bus.VerbCancel, &driverv1.Envelope{
		OperationId: k.req.OperationID,
		Body:        &driverv1.Envelope_Cancel{Cancel: &driverv1.Cancel{OperationId: k.req.OperationID}},
	})
	if err != nil {
		k.log().Warn("overdue operation not cancelled", "err", err)
	}

	return bus.OutcomeUnknownf("replica %s did not finish within %s", k.out.Replica, k.req.Timeout)
}

// resumeFromClaim takes up an operation that no replica lists: its claim tells what became
// of it.
func (m *mutation) resumeFromClaim(ctx context.Context) (done bool, err error) {
	switch d, err := m.checkClaim(ctx); d {
	case isDone:
		return true, err
	case mayAttach:
		return false, nil
	default:
	}
	if !m.req.OnlyIfHeld && len(m.c.replicas.live(m.req.Provider)) == 0 {
		return true, (&plainCall{claimReader: m.claimReader}).mutate(ctx)
	}

	return m.chooseRetryTarget(ctx)
}
