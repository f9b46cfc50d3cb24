package caller

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// maxClaimReads bounds how often a call reads the claim on its machine before it fails.
	maxClaimReads = 5
	// maxAsked bounds how many replicas are asked whether they have an operation.
	maxAsked = 64
	// maxTries bounds the tries of one Call. More means that replicas refuse or die
	// again and again, which the caller should learn.
	maxTries = 100
	// recheckInterval is the time between checks whether a replica is back.
	recheckInterval = bus.SessionInterval / 2
	// maxStoreTries is how many such intervals a call waits for the operations stream.
	maxStoreTries = 8
)

// A mutation is a call whose operation must take effect once, whatever dies.
type mutation struct {
	claimReader

	storeRefusals int // how often a replica could not write its claim
}

func newMutation(k *call) *mutation {
	return &mutation{claimReader: claimReader{call: k, denied: map[string]uint32{}}}
}

// mutate runs an operation that must not take effect twice.
func (m *mutation) mutate(ctx context.Context) error {
	if err := m.prepareClaim(ctx); err != nil {
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
		v, state := m.sendAndFollow(ctx)
		if v == gotResult {
			return m.endWithResult(state.result)
		}
		if done, err := m.handleVerdict(ctx, v, state.busy.GetReason()); done {
			return err
		}
	}

	return m.tryError("gave up after %d tries at replicas of provider %s; see their logs", maxTries, m.req.Provider)
}

// handleVerdict decides what follows a try without a result. If done is false, it has
// chosen number and target of another try.
func (m *mutation) handleVerdict(ctx context.Context, v verdict, busy driverv1.BusyReason) (done bool, err error) {
	switch v {
	case gotUnsent:
		return true, m.sendErr
	case gotNoResponder:
		switch {
		case m.target == "":
			return true, (&plainCall{claimReader: m.claimReader}).mutate(ctx)
		case m.attached():
			return m.awaitHolder(ctx)
		default:
			m.avoid = append(m.avoid, m.target) // left since its last session

			return m.retryAtOtherReplica()
		}
	case gotBusy:
		return m.onBusy(ctx, busy)
	case gotSilence:
		m.noteMayHaveRun()

		return m.findHolder(ctx)
	case gotHolderDied:
		m.log().Warn("the replica that ran the operation died")
		m.avoid = append(m.avoid, m.out.Replica)

		return m.retry(ctx) // the claim shows whether it has begun anything
	case gotDenial:
		m.denied[m.out.Replica] = m.number

		return m.retry(ctx)
	case gotOverdue:
		return true, m.endOverdue()
	default:
		return true, ctx.Err() //nolint:wrapcheck // the caller's own
	}
}

// onBusy decides what follows a refusal.
func (m *mutation) onBusy(ctx context.Context, why driverv1.BusyReason) (done bool, err error) {
	switch {
	case why == driverv1.BusyReason_BUSY_REASON_MACHINE:
		e := m.tryError("replica %s still runs another operation of this machine", m.out.Replica)
		e.Code = driverv1.Code_CODE_ABORTED // room for others there may be

		return true, e
	case why == driverv1.BusyReason_BUSY_REASON_STALE:
		return m.onStale(ctx)
	case m.attached():
		m.denied[m.out.Replica] = m.number

		return m.retry(ctx) // a replica with the operation would have attached us to it
	case why == driverv1.BusyReason_BUSY_REASON_STUCK:
		m.stuckAt = m.out.Replica

		return m.retryAtOtherReplica()
	case why == driverv1.BusyReason_BUSY_REASON_STORE:
		return m.awaitStore(ctx)
	case why == driverv1.BusyReason_BUSY_REASON_CLAIM:
		return m.retry(ctx)
	default:
		return m.retryAtOtherReplica()
	}
}

// onStale decides what follows when a replica refuses a request as stale: the bus was
// slow, or a clock is wrong.
func (m *mutation) onStale(ctx context.Context) (done bool, err error) {
	m.log().Warn("a replica refused a request as stale; if this repeats, compare the clock of its machine with the clock of this one")
	if !m.attached() {
		m.staleAt = m.out.Replica

		return m.retryAtOtherReplica()
	}
	// The refusal does not show whether the replica has the attempt.
	answer := m.c.ask(ctx, m.req.Provider, m.out.Replica, m.req.OperationID, m.number)
	switch {
	case ctx.Err() != nil:
		return true, ctx.Err() //nolint:wrapcheck // the caller's own
	case answer != nil && !holdsOperation(answer):
		m.denied[m.out.Replica] = m.number

		return m.retry(ctx)
	case answer.GetResult() != nil:
		return true, m.endWithResult(answer.GetResult())
	default:
		return true, m.tryError("replica %s may have the operation, but refuses requests as stale: compare its clock with mcm's", m.out.Replica)
	}
}

// attached reports whether the try went to a replica that may have this very attempt.
// Then an unreachable replica does not mean that nothing runs.
func (m *mutation) attached() bool { return m.target != "" && m.lastRan >= m.number }

// awaitHolder waits until the presumed holder, which has lost its connection, is back
// or dead.
func (m *mutation) awaitHolder(ctx context.Context) (done bool, err error) {
	if !slices.Contains(m.c.replicas.live(m.req.Provider), m.target) {
		m.avoid = append(m.avoid, m.target)

		return m.retry(ctx)
	}

	err = sleep(ctx, recheckInterval)

	return err != nil, err
}

// retryAtOtherReplica picks a replica with room for an attempt that was refused.
func (k *call) retryAtOtherReplica() (done bool, err error) {
	k.avoid = append(k.avoid, k.out.Replica) // its sessions may not show yet that it is full
	err = k.pickTarget()

	return err != nil, err
}

// awaitStore waits for an operations stream that is new or elects a leader, and picks a
// replica for another try.
func (m *mutation) awaitStore(ctx context.Context) (done bool, err error) {
	m.c.recheckStream(m.req.Provider)
	for m.storeRefusals < maxStoreTries {
		m.storeRefusals++
		if err := sleep(ctx, recheckInterval); err != nil {
			return true, err
		}
		if m.pickTarget() == nil {
			return false, nil
		}
	}

	return true, m.tryError("the operations stream %s takes no claims from replicas of provider %s: see the logs of mcm and NATS",
		bus.StreamName(m.c.cfg.Cluster, m.req.Provider), m.req.Provider)
}

// retry prepares a further attempt, unless an earlier one still runs or has ended. If none
// has run, the claim was of an earlier operation.
func (m *mutation) retry(ctx context.Context) (done bool, err error) {
	d, err := m.checkClaim(ctx)
	switch {
	case d != mayProceed:
		return d == isDone, err
	case m.mayHaveEffect():
		return m.chooseRetryTarget(ctx)
	default:
		err := m.pickTarget()

		return err != nil, err
	}
}

// chooseRetryTarget picks the replica for the next attempt.
func (m *mutation) chooseRetryTarget(ctx context.Context) (done bool, err error) {
	if m.req.OnlyIfHeld {
		return true, m.notHeld()
	}
	if back, err := m.awaitLostCreate(ctx); back || err != nil {
		return err != nil, err
	}
	if m.req.Look {
		return true, m.notHeld()
	}
	m.number, m.recover = m.lastRan+1, true
	switch {
	case m.pickTarget() == nil:
		return false, nil
	case m.c.replicas.noneImplements(m.req.Provider, m.op):
		return true, bus.Errorf(driverv1.Code_CODE_UNIMPLEMENTED, "no replica of provider %s implements %s", m.req.Provider, bus.Verb(m.op))
	default:
		return true, m.noRoom("no replica of provider %s has room for a further attempt", m.req.Provider)
	}
}

// ErrNotHeld is wrapped by the error of a Call with OnlyIfHeld or Look if no replica
// has the operation and its outcome is not stored. An attempt that has begun may take
// effect until its deadline. Once its claim is replaced, no attempt begins.
var ErrNotHeld = errors.New("the outcome of the operation is not known")

func (k *call) notHeld() error {
	return bus.Errorf(driverv1.Code_CODE_NOT_FOUND, "%w: no replica of provider %s has the operation, and the operations stream has no result",
		ErrNotHeld, k.req.Provider)
}

// awaitLostCreate delays a create that the cloud cannot tell from a lost one. It waits
// until the lost call can no longer take effect unseen, or its replica is back.
func (m *mutation) awaitLostCreate(ctx context.Context) (back bool, err error) {
	if m.op != driverv1.Operation_OPERATION_CREATE {
		return false, nil
	}
	for said := ""; ; {
		why := m.duplicateRisk(time.Now())
		if why == nil {
			return false, nil
		}
		if text := why.Error(); text != said {
			said = text
			m.reportWaiting(why)
		}
		if err := sleep(ctx, recheckInterval); err != nil {
			return false, err
		}
		if m.targetHolder() {
			return true, nil
		}
	}
}

// duplicateRisk returns why a further attempt at a create could make a second instance
// unseen, or nil.
func (m *mutation) duplicateRisk(now time.Time) *bus.Error {
	identified, settle := m.c.replicas.identity(m.req.Provider)
	earlier, lost := m.earlierCreate.Add(settle), m.lastDeadline().Add(settle)
	stuck := m.c.replicas.stuckAt(m.req.Provider, m.req.OperationID)
	switch {
	case !m.earlierCreate.IsZero() && now.Before(earlier):
		return m.tryError("the outcome of an earlier create of this machine is unknown, and another create could make a second instance: "+
			"mcm waits until %s, and then looks", earlier.UTC().Format(time.RFC3339))
	case identified:
		return nil
	case stuck != "":
		return m.tryError("a create for this machine ignores its deadline at replica %[2]s of provider %[1]s, and another create could make a second instance: "+
			"restart that replica", m.req.Provider, stuck)
	case !m.nothingBegun && now.Before(lost):
		return m.tryError("a driver replica was lost during the create, and the cloud of provider %s does not show at once whether it made the instance: "+
			"mcm waits until %s, so as not to make a second one, and then looks",
			m.req.Provider, lost.UTC().Format(time.RFC3339))
	default:
		return nil
	}
}

// targetReplica directs the next try to the replica that has an attempt.
func (r *claimReader) targetReplica(replica string, attempt uint32) {
	r.noteEarlierAttempt(attempt)
	r.target, r.number, r.replaces = replica, attempt, nil
}

// targetHolder directs the next try to the replica that lists the operation. It reports
// whether there is one.
func (m *mutation) targetHolder() bool {
	h, ok := m.c.replicas.holderOf(m.req.Provider, m.req.OperationID)
	if !ok || h.fenced { // of a fenced one the claim decides
		return false
	}
	m.targetReplica(h.replica, max(1, h.attempt))

	return true
}

// findHolder asks all replicas which of them took a request whose frames were lost. One
// round is enough: the claim shows whether a replica that does not answer has begun.
func (m *mutation) findHolder(ctx context.Context) (done bool, err error) {
	asked := m.c.replicas.live(m.req.Provider)
	asked = asked[:min(len(asked), maxAsked)]
	if len(asked) == 0 {
		return true, (&plainCall{claimReader: m.claimReader}).mutate(ctx) // a wiretap hid that no driver subscribes; the claim decides
	}
	for i, answer := range m.askAll(ctx, asked) {
		switch {
		case answer == nil:
		case holdsOperation(answer):
			m.target, m.replaces = asked[i], nil // the replica attaches us to the running operation

			return false, nil
		default:
			m.denied[asked[i]] = m.number
		}
	}
	if ctx.Err() != nil {
		return true, ctx.Err() //nolint:wrapcheck // the caller's own
	}

	return m.retry(ctx)
}

// askAll asks replicas about the call's attempt, all at once. The answer of a replica
// that was too slow is nil.
func (m *mutation) askAll(ctx context.Context, replicas []string) []*driverv1.OpsResponse {
	said := make([]*driverv1.OpsResponse, len(replicas))
	var all sync.WaitGroup
	for i, id := range replicas {
		all.Go(func() { said[i] = m.c.ask(ctx, m.req.Provider, id, m.req.OperationID, m.number) })
	}
	all.Wait()

	return said
}

// holdsOperation reports whether a replica answers that it has the operation. A fenced
// attempt does not count: the result of the attempt that replaced it will be stored.
func holdsOperation(answer *driverv1.OpsResponse) bool {
	for _, st := range answer.GetOperations() {
		if !st.GetFenced() {
			return true
		}
	}

	return false
}

// resume looks for the replica that has the operation before it is retried. Each live
// replica gets the time to send a session first.
func (m *mutation) resume(ctx context.Context) (done bool, err error) {
	if !m.c.conn.Up() {
		return true, m.notConnected()
	}
	if err := sleep(ctx, time.Until(m.c.connectedSince().Add(deathLimit))); err != nil {
		return true, err
	}
	if m.targetHolder() {
		return false, nil
	}
	// No replica lists it, so its claim shows how it goes on.
	d, err := m.checkClaim(ctx)
	switch {
	case d != mayProceed:
		return d == isDone, err
	case !m.req.OnlyIfHeld && len(m.c.replicas.live(m.req.Provider)) == 0:
		return true, (&plainCall{claimReader: m.claimReader}).mutate(ctx)
	default:
		return m.chooseRetryTarget(ctx)
	}
}

// endOverdue cancels an operation that its live holder does not finish in time.
func (k *call) endOverdue() error {
	if err := k.c.cancel(k.req.Provider, k.out.Replica, k.req.OperationID); err != nil {
		k.log().Warn("overdue operation not cancelled", "err", err)
	}

	return bus.OutcomeUnknownf("replica %s did not finish within %s", k.out.Replica, k.req.Timeout)
}
