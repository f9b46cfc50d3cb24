package caller

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/opstream"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A finding is what the claim on a machine means for an operation of the machine.
type finding int

const (
	isFree    finding = iota // it may be replaced
	isOurs                   // it has this operation's outcome
	isHeld                   // an attempt at this operation runs at a live replica
	isBusy                   // another operation runs at a live replica
	isStale                  // a later operation of the machine has begun
	isPlain                  // a plain driver may have this operation and cannot be asked
	isUnheard                // it runs, and its replica had no time to send a session
)

// A replicaStanding is what is known of the replica that a claim names.
type replicaStanding struct {
	live    bool
	unheard bool // the connection is too new to know whether it lives
	denied  bool // the claim is our own, or the replica denied having this attempt or has ended it
}

// judgeClaim returns what a claim means for operation id. It reads no clock and sends
// nothing.
//
// The claim of a dead replica is free: once the claim is replaced, that replica begins
// nothing more. The claim's state shows whether it has begun anything.
func judgeClaim(c *driverv1.Claim, id string, who replicaStanding) finding {
	same := c.GetOperationId() == id
	switch {
	case c == nil: // no record, or an invalid one
		return isFree
	case same && c.GetState() == driverv1.Claim_STATE_SETTLED:
		return isOurs
	case !same && laterThan(c.GetOperationId(), id):
		return isStale
	case !claimRuns(c), who.denied:
		return isFree
	case same && c.GetReplica() == bus.PlainReplica:
		return isPlain
	case !who.live && who.unheard:
		return isUnheard
	case !who.live:
		return isFree
	case same:
		return isHeld
	default:
		return isBusy
	}
}

// laterThan reports whether the number of an operation is at least that of operation id.
// Number 0 does not count: every Machine without a journal starts with it.
func laterThan(operation, id string) bool {
	old, known := opstream.OperationNumber(operation)
	n, ok := opstream.OperationNumber(id)

	return known && ok && old >= n && old > 0
}

// claimRuns reports whether, by its claim, an attempt has not ended.
func claimRuns(c *driverv1.Claim) bool {
	return c.GetState() == driverv1.Claim_STATE_RUNNING || c.GetState() == driverv1.Claim_STATE_BEGUN
}

// A decision is what a call does once it has read the claim.
type decision int

const (
	mayProceed decision = iota // and replace the record k.replaces
	mayAttach                  // to the operation at k.target
	isDone                     // with the returned error, or with the outcome in k.out
)

// A claimReader decides by the claim on a call's machine what the call may do.
type claimReader struct {
	*call

	denied         map[string]uint32 // the last attempt that each replica denied having; nil for reads
	endedOperation string            // another operation of the machine that has ended, whatever its claim says
	reportedPlain  bool              // OnWaiting knows that the call waits for a plain driver's claim
}

// checkClaim reads the claim on the call's machine and decides what the call may do.
func (r *claimReader) checkClaim(ctx context.Context) (decision, error) {
	for looks := 0; looks < maxClaimReads; looks++ {
		c, sequence, err := r.readClaim(ctx)
		if err != nil {
			return isDone, err
		}
		r.notBegun = 0
		switch judgeClaim(c, r.req.OperationID, r.standing(c, sequence)) {
		case isFree:
			return r.mayReplace(ctx, c, sequence)
		case isOurs:
			return isDone, r.endWithStored(c)
		case isHeld:
			r.targetReplica(c.GetReplica(), c.GetAttempt())

			return mayAttach, nil
		case isStale:
			return isDone, laterOperationError(c.GetOperationId())
		case isUnheard:
			err = sleep(ctx, time.Until(r.c.connectedSince().Add(deathLimit)))
		case isPlain:
			err = r.waitForPlainClaim(ctx, c)
			looks-- // without end: the claim expires
		case isBusy:
			err = r.checkOtherOperation(ctx, c)
		}
		if err != nil {
			return isDone, err
		}
	}

	return isDone, r.tryError("the claim on the machine keeps changing; retrying")
}

// waitForPlainClaim waits a while for a plain driver's claim to expire. Such a driver
// cannot be asked whether it still has the operation.
func (r *claimReader) waitForPlainClaim(ctx context.Context, c *driverv1.Claim) error {
	r.noteEarlierAttempt(c.GetAttempt())
	if !r.reportedPlain {
		r.reportedPlain = true
		r.reportWaiting(r.tryError("a driver of provider %s without sessions may still run attempt %d of the operation: "+
			"waiting for the deadline of that attempt",
			r.req.Provider, c.GetAttempt()))
	}

	return sleep(ctx, recheckInterval)
}

// mayReplace lets the next attempt replace a claim.
func (r *claimReader) mayReplace(ctx context.Context, c *driverv1.Claim, sequence uint64) (decision, error) {
	r.replaces = &sequence
	if sequence != 0 && sequence == r.plainClaim {
		return mayProceed, nil // our own: what it replaced was checked then
	}
	if err := r.checkClaimLost(ctx, c, sequence); err != nil {
		return isDone, err
	}
	r.noteLostCreate(c)
	if c.GetOperationId() == r.req.OperationID {
		r.noteEarlierAttempt(c.GetAttempt())
		if c.GetState() == driverv1.Claim_STATE_RUNNING {
			r.notBegun = c.GetAttempt()
		}
	}

	return mayProceed, nil
}

// noteLostCreate notes a lost create under another operation id, as after a restore of
// the Machine from a backup. Its token differs, so the cloud cannot tell the two creates
// apart. The lost call may take effect until its deadline.
func (r *claimReader) noteLostCreate(c *driverv1.Claim) {
	const create = driverv1.Operation_OPERATION_CREATE
	lost := c.GetState() == driverv1.Claim_STATE_BEGUN || c.GetState() == driverv1.Claim_STATE_RELEASED
	if !lost || r.op != create || c.GetOperation() != create || c.GetOperationId() == r.req.OperationID ||
		c.GetReplica() == bus.PlainReplica { // whose claim does not change when the operation ends
		return
	}
	latest := time.Now().Add(bus.AcceptBy + r.req.Timeout)
	r.earlierCreate, r.nothingBegun = latest, false
	if claimed := c.GetClaimedAt(); claimed.IsValid() { // by the replica's clock, which AcceptBy allows for
		if over := claimed.AsTime().Add(bus.AcceptBy + r.req.Timeout); over.Before(latest) {
			r.earlierCreate = over
		}
	}
}

// laterOperationError returns the error for a machine with a claim of a later operation.
func laterOperationError(later string) error {
	number, _ := opstream.OperationNumber(later) // a later operation has a number
	if number >= math.MaxInt64 {
		number = 0 // nothing comes after it
	}

	return &bus.Error{Code: driverv1.Code_CODE_ABORTED, Later: int64(number), Err: fmt.Errorf(
		"the machine has a later operation, %s: another manager leads, or the Machine was restored from an older backup", later)}
}

// checkClaimLost notes whether the missing claim of an operation that may run was lost
// with the stream. Then the operation may have begun. It begins nothing more, as the
// sequence that its replica expects never comes again.
func (r *claimReader) checkClaimLost(ctx context.Context, c *driverv1.Claim, sequence uint64) error {
	r.nothingBegun = false
	lost := sequence == 0
	if r.lastRan == 0 || !lost && (c == nil || c.GetOperationId() == r.req.OperationID) {
		return nil
	}
	provider := r.req.Provider
	if !r.taken.IsZero() {
		r.c.recheckStream(provider) // a replica had a claim that is missing
	}
	tried := time.Since(r.firstTry)
	age, err := r.c.streams.ageOf(ctx, provider)
	switch {
	case ctx.Err() != nil:
		return ctx.Err() //nolint:wrapcheck // the caller's own
	case err == nil:
		// The deadlines of claims that an older stream lost have passed. A stream older than
		// this call's first attempt would have that attempt's claim.
		r.nothingBegun = r.taken.IsZero() && (age > bus.AcceptBy+r.req.Timeout || !r.req.Recover && age > tried)
	case lost:
		r.c.recheckStream(provider)

		return r.tryError("cannot read the age of the operations stream, so the claim on the machine may be lost: %w", err)
	}

	return nil
}

// readClaim returns the claim on the call's machine, or nil, and its sequence.
func (r *claimReader) readClaim(ctx context.Context) (*driverv1.Claim, uint64, error) {
	provider := r.req.Provider
	subject, err := opstream.ClaimSubject(r.c.cfg.Cluster, provider, bus.MachineOf(r.req.Body).GetUid())
	if err != nil {
		return nil, 0, r.unsendable(err)
	}
	found, err := r.c.ledger(provider).Last(ctx, subject)
	switch {
	case ctx.Err() != nil:
		return nil, 0, ctx.Err() //nolint:wrapcheck // the caller's own
	case err != nil:
		r.c.recheckStream(provider)

		return nil, 0, r.tryError("cannot read the claim on the machine: %w", err)
	case found == nil:
		return nil, 0, nil
	default:
		return found.Envelope.GetClaim(), found.Sequence, nil
	}
}

// standing returns what is known of a claim's replica.
func (r *claimReader) standing(c *driverv1.Claim, sequence uint64) replicaStanding {
	return replicaStanding{
		live:    r.c.replicas.lives(r.req.Provider, c.GetReplica()),
		unheard: time.Until(r.c.connectedSince().Add(deathLimit)) > 0,
		denied: sequence != 0 && sequence == r.plainClaim || r.endedOperation != "" && r.endedOperation == c.GetOperationId() ||
			r.denied[c.GetReplica()] >= c.GetAttempt() && r.denied[c.GetReplica()] > 0 && c.GetOperationId() == r.req.OperationID,
	}
}

// checkOtherOperation asks whether another operation still runs, as its claim says. It
// returns an error if so.
func (r *claimReader) checkOtherOperation(ctx context.Context, c *driverv1.Claim) error {
	answer := r.c.ask(ctx, r.req.Provider, c.GetReplica(), c.GetOperationId(), c.GetAttempt())
	if ctx.Err() != nil {
		return ctx.Err() //nolint:wrapcheck // the caller's own
	}
	busy := answer == nil
	for _, st := range answer.GetOperations() {
		busy = busy || !st.GetSettled()
	}
	if busy {
		return r.tryError("operation %s of this machine still runs at replica %s", c.GetOperationId(), c.GetReplica())
	}
	r.endedOperation = c.GetOperationId()

	return nil
}

// endWithStored ends the call with the outcome in the claim.
func (r *claimReader) endWithStored(c *driverv1.Claim) error {
	result, partial := opstream.ResultOf(c, r.c.cfg.Key)
	r.noteEarlierAttempt(c.GetAttempt())
	r.out.Replica, r.out.Partial, r.taken = c.GetReplica(), partial, time.Now()
	r.earlierMayRun = false // its replica knew of earlier attempts and stored the valid outcome
	r.c.log.Info("outcome found in the operations stream", "machine", r.req.Namespace+"/"+r.req.Name,
		"operation_id", r.req.OperationID, "attempt", c.GetAttempt(), "replica", c.GetReplica())

	return r.endWithResult(result)
}

// readFirstClaim finds the claim that a first attempt replaces.
func (m *mutation) readFirstClaim(ctx context.Context) (done bool, err error) {
	if n, ok := opstream.OperationNumber(m.req.OperationID); ok && n == 0 {
		m.replaces = new(uint64) // presumably the first operation of the machine

		return false, nil
	}
	d, err := m.checkClaim(ctx)
	if d == mayProceed && m.mayHaveEffect() { // another caller has begun it
		return m.chooseRetryTarget(ctx)
	}

	return d == isDone, err
}

// prepareClaim checks that the call's operation can be claimed.
func (m *mutation) prepareClaim(ctx context.Context) error {
	_, err := m.subject(bus.TreeDriver, "")
	if err == nil {
		_, err = opstream.ClaimSubject(m.c.cfg.Cluster, m.req.Provider, bus.MachineOf(m.req.Body).GetUid())
	}
	if err == nil && m.c.streams == nil {
		err = errReadsOnly
	}
	if err != nil {
		return m.unsendable(err)
	}
	err = m.c.awaitStream(ctx, m.req.Provider)
	switch {
	case ctx.Err() != nil:
		return ctx.Err() //nolint:wrapcheck // the caller's own
	case err != nil:
		return m.tryError("the operation cannot be claimed yet: %w", err)
	default:
		return nil
	}
}
