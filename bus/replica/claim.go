package replica

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/opstream"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// storeRetryInterval is the time between tries to store an outcome.
const storeRetryInterval = 2 * bus.SessionInterval

// claims write a replica's records into the operations streams: RUNNING, BEGUN and the
// outcome of its operations. They are safe for concurrent use.
type claims struct {
	part

	ops      *operations
	out      *outbox
	inquirer *opstream.Inquirer
	unfenced bool // for tests that show what fencing prevents

	highest map[string]ackedClaim // by cluster; guarded by ops.mu
}

// ledger returns access to the operations stream of a control plane.
func (cs *claims) ledger(cluster string) opstream.Ledger {
	return opstream.Ledger{Inquirer: cs.inquirer, Stream: bus.StreamName(cluster, cs.cfg.Provider)}
}

// claim replaces the claim that the request's terms name by our own [CLAIM-1]. It returns
// why it could not.
func (cs *claims) claim(ctx context.Context, op *operation) *driverv1.BusyReason {
	terms := op.request.GetClaimTerms()
	if terms.Sequence == nil {
		return cs.claimRefusal(op, opstream.ErrConflict) // we do not have the operation, or the request would have been attached
	}
	env := cs.claimEnvelope(op, driverv1.Claim_STATE_RUNNING)
	// No deadline or cancel ends the write, as it would be unknown whether it was stored.
	seq, err := cs.ledger(op.cluster).Put(context.WithoutCancel(ctx), op.claimSubject, env, terms.GetSequence(), 0)
	if err == nil {
		cs.ops.mu.Lock()
		op.firstClaim = seq
		cs.noteSequenceLocked(op, seq)
		cs.ops.mu.Unlock()
	}

	return cs.claimRefusal(op, err)
}

// An ackedClaim is the highest sequence that a stream has acknowledged to this replica.
type ackedClaim struct {
	sequence uint64
	made     time.Time // when the stream was made
}

// noteSequenceLocked notes the sequence of an operation's newest record.
func (cs *claims) noteSequenceLocked(op *operation, sequence uint64) {
	op.claim = sequence
	made := op.request.GetClaimTerms().GetStreamMade()
	if !made.IsValid() {
		return
	}
	switch highest := cs.highest[op.cluster]; {
	case made.AsTime().After(highest.made):
		cs.highest[op.cluster] = ackedClaim{sequence, made.AsTime()}
	case made.AsTime().Equal(highest.made):
		cs.highest[op.cluster] = ackedClaim{max(sequence, highest.sequence), highest.made}
	}
}

// claimRefusal turns the error of a claim into a refusal, and nil into nil.
func (cs *claims) claimRefusal(op *operation, err error) *driverv1.BusyReason {
	reason := driverv1.BusyReason_BUSY_REASON_STORE
	switch {
	case err == nil:
		return nil
	case errors.Is(err, opstream.ErrConflict):
		reason = driverv1.BusyReason_BUSY_REASON_CLAIM
	default:
		// The number in the request, as op.attempt may change concurrently.
		cs.log.Warn("operation not claimed", "operation_id", op.id, "attempt", op.request.GetAttempt(), "err", err)
	}

	return &reason
}

// claimEnvelope returns an operation's record. It reads fields that change under ops.mu.
func (cs *claims) claimEnvelope(op *operation, state driverv1.Claim_State) *driverv1.Envelope {
	cs.ops.mu.Lock()
	defer cs.ops.mu.Unlock()
	c := &driverv1.Claim{
		OperationId: op.id, Attempt: op.attempt, Operation: op.operation, Namespace: op.namespace, Name: op.name,
		Provider: cs.cfg.Provider, Replica: cs.cfg.Replica, Epoch: op.request.GetEpoch(),
		State: state, ClaimedAt: timestamppb.New(op.started),
	}
	if !op.ended.IsZero() {
		c.EndedAt = timestamppb.New(op.ended)
	}

	return &driverv1.Envelope{OperationId: op.id, Attempt: op.attempt, Replica: cs.cfg.Replica, Body: &driverv1.Envelope_Claim{Claim: c}}
}

// storeOutcome replaces an operation's claim by its outcome [CLAIM-5]. It does not wait for
// the acknowledgement: a connected mcm gets the result directly.
func (cs *claims) storeOutcome(op *operation, result *driverv1.Result) {
	state := driverv1.Claim_STATE_SETTLED
	if result.GetOutcomeUnknown() {
		state = driverv1.Claim_STATE_RELEASED
	}
	env := cs.claimEnvelope(op, state)
	if state == driverv1.Claim_STATE_SETTLED {
		env.GetClaim().Outcome = cs.outcome(op, result)
	}
	cs.ops.mu.Lock()
	expected := op.claim
	op.storedAt = time.Now()
	cs.ops.mu.Unlock()
	m, err := opstream.Message(op.claimSubject, env, expected, 0)
	if err == nil {
		_, err = cs.inquirer.Send(m, func(answer *nats.Msg) { cs.onOutcomeStored(op, expected, answer) })
	}
	if err != nil {
		cs.log.Debug("outcome not stored yet", "operation_id", op.id, "err", err)
	}
}

func (cs *claims) onOutcomeStored(op *operation, replaced uint64, answer *nats.Msg) {
	seq, err := opstream.SequenceOf(answer)
	_, final := opstream.ConflictOf(err) // a conflict with a concurrent write is not final
	if awaited := cs.noteOutcome(op, replaced, seq, final, err); awaited != nil {
		cs.out.send(op, bus.ResultFrame(awaited))
	}
}

// noteOutcome notes the stream's answer to an outcome. It returns the result if the caller
// has waited for it to be stored.
func (cs *claims) noteOutcome(op *operation, replaced, seq uint64, final bool, err error) (awaited *driverv1.Result) {
	cs.ops.mu.Lock()
	defer cs.ops.mu.Unlock()
	switch {
	case err == nil:
		if !op.resultCounts() {
			awaited = op.result
		}
		op.outcomeStored = true
		cs.noteSequenceLocked(op, seq)
		signal(cs.ops.acked)
	case final && !op.outcomeStored && op.claim == replaced:
		// Another attempt has replaced our claim, or an acknowledgement was lost. Either way
		// there is nothing more to write.
		op.outcomeStored, op.fenced = true, true
		if op.askedAgain && cs.ops.byID[op.key()] == op {
			delete(cs.ops.byID, op.key()) // the caller asks again and finds the stored outcome
		}
		cs.log.Info("outcome not stored: another attempt has replaced the claim", "operation_id", op.id, "attempt", op.attempt)
	default:
		cs.log.Debug("outcome not stored yet", "operation_id", op.id, "err", err)
	}
	if op.outcomeStored && op.acknowledged && cs.ops.byID[op.key()] == op {
		delete(cs.ops.byID, op.key())
	}

	return awaited
}

// storeOutcomes retries outcomes that could not be stored, unless they were sent recently.
func (cs *claims) storeOutcomes(cluster string) {
	due := func(op *operation) bool { return op.cluster == cluster && time.Since(op.storedAt) > storeRetryInterval }
	for op, result := range cs.ops.unstored(due) {
		cs.storeOutcome(op, result)
	}
}

// outcome returns what is stored of a result. Only what the Machine object shows anyway
// is stored in clear.
func (cs *claims) outcome(op *operation, r *driverv1.Result) *driverv1.Outcome {
	instance, state := opstream.InstanceOf(r)
	o := &driverv1.Outcome{
		Code: r.GetStatus().GetCode(), RetryAfter: r.GetStatus().GetRetryAfter(),
		ProviderId: instance.GetProviderId(), NodeName: instance.GetNodeName(), Addresses: instance.GetAddresses(),
	}
	if cs.cfg.Seal != nil {
		o.Sealed = cs.cfg.Seal(op.cluster, &driverv1.SealedOutcome{
			OperationId: op.id, Message: r.GetStatus().GetMessage(), LastKnownState: state,
		})
	}

	return o
}
