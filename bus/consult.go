package bus

import (
	"context"
	"errors"
	"time"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A finding is what the claim on a machine means for an operation of it.
type finding int

const (
	isFree     finding = iota // nothing runs under it: it may be replaced
	isOurs                    // this operation's outcome is in it
	isHeld                    // an attempt at this operation runs, at a replica that lives
	isDoubtful                // its replica lives, under another session: an earlier one, or a later one not heard of yet
	isBusy                    // another operation runs, at a replica that lives
	isSilence                 // its replica is not heard: it has to be fenced first
	isStale                   // a later operation of the machine has begun
)

// A standing is what is known of the replica that a claim names.
type standing struct {
	live    bool
	session string // its present session id
	denied  bool   // it said that it does not have this attempt, or has ended it
	buried  bool   // the claim's session is fenced
}

// judgeClaim tells what a claim means for operation id. It reads no clock and
// asks nobody.
func judgeClaim(c *driverv1.Claim, id string, who standing) finding {
	same := c.GetOperationId() == id
	old, known := operationNumber(c.GetOperationId())
	n, ok := operationNumber(id)
	switch {
	case c == nil: // nothing, or nonsense
		return isFree
	case same && c.GetState() == driverv1.Claim_STATE_SETTLED:
		return isOurs
	case !same && known && ok && old > n:
		return isStale
	case c.GetState() != driverv1.Claim_STATE_RUNNING, who.buried, who.denied:
		return isFree
	case who.live && who.session != c.GetSessionId():
		return isDoubtful
	case who.live && same:
		return isHeld
	case who.live:
		return isBusy
	default:
		return isSilence
	}
}

// A decision is what a call does after it has read the claim.
type decision int

const (
	mayProceed decision = iota // with k.terms
	mayAttach                  // k.target has it
	isDone                     // with the error returned, nil for an outcome in k.out
)

// consult reads the claim on the call's machine and sees to it that whoever holds
// it has stopped.
func (k *call) consult(ctx context.Context) (decision, error) {
	for range findTries {
		c, sequence, err := k.readClaim(ctx)
		if err != nil {
			return isDone, err
		}
		switch judgeClaim(c, k.req.OperationID, k.standing(c)) {
		case isFree:
			if err := k.outwait(ctx, c, sequence); err != nil {
				return isDone, err
			}
			k.terms = &driverv1.ClaimTerms{Sequence: &sequence}
			if c.GetOperationId() == k.req.OperationID {
				k.learns(c.GetAttempt())
			}

			return mayProceed, nil
		case isOurs:
			return isDone, k.stored(c)
		case isHeld:
			k.attach(c)

			return mayAttach, nil
		case isDoubtful, isBusy:
			if d, err := k.inquires(ctx, c); d != mayProceed {
				return d, err
			}
		case isStale:
			return isDone, Errorf(driverv1.Code_CODE_ABORTED,
				"operation %s of the machine has begun since: another manager leads", c.GetOperationId())
		case isSilence:
			alive, err := k.stopped(ctx, c.GetReplica())
			if err != nil {
				return isDone, err
			}
			if !alive {
				k.fenced(c.GetSessionId())
			}
		}
	}

	return isDone, k.notStarted("the claim on the machine changes all the time; looking again")
}

// attach has the next try go to who has claimed the operation.
func (k *call) attach(c *driverv1.Claim) { k.holder(c.GetReplica(), c.GetAttempt()) }

// outwait makes sure, where an operation that may run has no claim, that it was not
// lost along with the stream: whoever claimed it there holds no lease any more once
// the stream that has taken its place is as old as that can last.
func (k *call) outwait(ctx context.Context, c *driverv1.Claim, sequence uint64) error {
	k.unclaimed = false
	lost := sequence == 0
	if k.ran == 0 || !lost && (c == nil || c.GetOperationId() == k.req.OperationID) {
		return nil
	}
	provider := k.req.Provider
	age, err := k.c.streams.ageOf(ctx, provider)
	switch {
	case ctx.Err() != nil:
		return ctx.Err() //nolint:wrapcheck // the caller's own
	case err == nil:
		// What an older stream may have known of has had its time.
		k.unclaimed = age > acceptBy+k.req.Timeout
	case lost:
		k.c.lost(provider, err)

		return k.notStarted("cannot tell whether the claim on the machine was lost: %w", err)
	}
	if !lost {
		return nil
	}

	return sleep(ctx, deathLimit-age)
}

// readClaim returns the claim on the call's machine, nil for none, and its
// sequence.
func (k *call) readClaim(ctx context.Context) (*driverv1.Claim, uint64, error) {
	provider := k.req.Provider
	subject, err := claimSubject(k.c.cfg.Cluster, provider, MachineOf(k.req.Body).GetUid())
	if err != nil {
		k.sendErr = err

		return nil, 0, k.unsendable()
	}
	found, err := k.c.ledger(provider).last(ctx, subject)
	switch {
	case ctx.Err() != nil:
		return nil, 0, ctx.Err() //nolint:wrapcheck // the caller's own
	case err != nil:
		k.c.lost(provider, err)

		return nil, 0, k.notStarted("cannot tell who has the machine: %w", err)
	case found == nil:
		return nil, 0, nil
	default:
		return found.envelope.GetClaim(), found.sequence, nil
	}
}

// stopped makes sure that a replica that is not heard of has stopped, or leaves
// one that lives the time to be heard again.
func (k *call) stopped(ctx context.Context, replica string) (alive bool, err error) {
	alive, err = k.c.fence(ctx, k.req.Provider, replica)
	switch {
	case ctx.Err() != nil:
		return false, ctx.Err() //nolint:wrapcheck // the caller's own
	case err != nil:
		return false, k.notStarted("replica %s is not heard of any more: %w", replica, err)
	case alive:
		return true, sleep(ctx, askAgain)
	default:
		return false, nil
	}
}

// standing gathers what is known of a claim's replica.
func (k *call) standing(c *driverv1.Claim) standing {
	session, live := k.c.replicas.session(k.req.Provider, c.GetReplica())

	return standing{
		live: live, session: session,
		denied: k.over != "" && k.over == c.GetOperationId() ||
			k.denied[c.GetReplica()] >= c.GetAttempt() && k.denied[c.GetReplica()] > 0 && c.GetOperationId() == k.req.OperationID,
		buried: k.buried[c.GetSessionId()] || k.c.replicas.isBuried(c.GetSessionId()),
	}
}

// fenced notes that nothing can be begun under a session any more.
func (k *call) fenced(session string) {
	if k.buried == nil {
		k.buried = map[string]bool{}
	}
	k.buried[session] = true
}

// denies notes that a replica will not take an attempt at this call's operation.
func (k *call) denies(replica string, attempt uint32) {
	if k.denied == nil {
		k.denied = map[string]uint32{}
	}
	k.denied[replica] = attempt
}

// asks finds out whether another operation, whose claim says that it runs, does.
func (k *call) asks(ctx context.Context, c *driverv1.Claim) (held bool, err error) {
	answer := k.c.ask(ctx, k.req.Provider, c.GetReplica(), c.GetOperationId(), c.GetAttempt())
	if ctx.Err() != nil {
		return false, ctx.Err() //nolint:wrapcheck // the caller's own
	}
	busy := answer == nil
	for _, st := range answer.GetOperations() {
		busy = busy || !st.GetSettled()
	}
	if busy {
		return true, k.notStarted("operation %s of this machine still runs at replica %s", c.GetOperationId(), c.GetReplica())
	}
	// Not of its session: the replica may take this call's operation under that.
	k.over = c.GetOperationId()

	return false, nil
}

// inquires finds out whether a replica that lives has what its claim says. To
// proceed is to look at the claim again.
func (k *call) inquires(ctx context.Context, c *driverv1.Claim) (decision, error) {
	if c.GetOperationId() != k.req.OperationID {
		if held, err := k.asks(ctx, c); held || err != nil {
			return isDone, err
		}

		return mayProceed, nil
	}
	answer := k.c.ask(ctx, k.req.Provider, c.GetReplica(), c.GetOperationId(), c.GetAttempt())
	switch {
	case ctx.Err() != nil:
		return isDone, ctx.Err() //nolint:wrapcheck // the caller's own
	case answer == nil:
		k.learns(c.GetAttempt())

		return isDone, k.notStarted("replica %s does not say whether it has the operation", c.GetReplica())
	case k.holds(answer):
		k.attach(c)

		return mayAttach, nil
	default:
		k.denies(c.GetReplica(), c.GetAttempt())

		return mayProceed, nil
	}
}

// stored ends the call with an outcome that was stored while nobody listened.
func (k *call) stored(c *driverv1.Claim) error {
	result, partial := resultOf(c, k.c.cfg.Key)
	k.learns(c.GetAttempt())
	k.out.Replica, k.out.Partial, k.taken = c.GetReplica(), partial, time.Now()
	k.doubted = false // its replica was told of that, and stores what counts
	k.c.log.Info("outcome found in the operations stream", "machine", k.req.Namespace+"/"+k.req.Name,
		"operation_id", k.req.OperationID, "attempt", c.GetAttempt(), "replica", c.GetReplica())

	return k.settle(result)
}

// open finds out what claim a first attempt has to replace.
func (k *call) open(ctx context.Context) (done bool, err error) {
	if n, ok := operationNumber(k.req.OperationID); ok && n == 0 {
		none := uint64(0)
		k.terms = &driverv1.ClaimTerms{Sequence: &none} // the first operation of the machine, as far as we know

		return false, nil
	}
	switch d, err := k.consult(ctx); d {
	case isDone:
		return true, err
	case mayAttach:
		return false, nil
	default:
		if k.ran > 0 { // begun by somebody else
			return k.attempt(ctx)
		}

		return false, nil
	}
}

// onClaim goes on after the claim was found to be another one than expected.
func (k *call) onClaim(ctx context.Context) (done bool, err error) {
	if k.ran > 0 || k.again {
		return k.next(ctx)
	}
	switch d, err := k.consult(ctx); d {
	case isDone:
		return true, err
	case mayAttach:
		return false, nil
	default:
	}
	if k.ran > 0 {
		return k.attempt(ctx)
	}
	// Nothing of this operation has run; it is the claim of an earlier one.
	k.target = k.c.replicas.pick(k.req.Provider, k.op, k.claimed, time.Now(), k.avoid)
	if k.target == "" {
		return true, k.allBusy()
	}

	return false, nil
}

// arrange finds out whether the call's operation is to be claimed.
func (k *call) arrange(ctx context.Context) (done bool, err error) {
	k.claimed, err = k.c.claims(ctx, k.req.Provider)
	switch {
	case ctx.Err() != nil:
		return true, ctx.Err() //nolint:wrapcheck // the caller's own
	case errors.Is(err, errSubject):
		return false, nil
	case err != nil:
		return true, k.notStarted("waiting: %w", err)
	case k.claimed && k.again && k.unsure:
		return k.recallPlain(ctx)
	default:
		return false, nil
	}
}
