package bus

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/types/known/timestamppb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// storeAgain is the time between tries to store an outcome.
const storeAgain = 2 * SessionInterval

func claimSubject(cluster, provider, machine string) (string, error) {
	return Subject{Cluster: cluster, Tree: TreeClaim, Provider: provider, Machine: machine}.Build()
}

// ledger is the access to the operations stream of a control plane.
func (s *Server) ledger(cluster string) ledger {
	return ledger{inquirer: s.inquirer, stream: StreamName(cluster, s.cfg.Provider)}
}

// claimAndRun runs an operation once the operations stream says that it is ours.
func (s *Server) claimAndRun(ctx context.Context, h *held) {
	refusal := s.claim(ctx, h)
	s.mu.Lock()
	h.claiming = false
	if refusal != nil {
		s.occupy(h.operation, -1)
		delete(s.machines, h.machineKey())
		delete(s.held, h.key())
	}
	s.mu.Unlock()
	if refusal != nil {
		h.cancel()
		s.tasks.Done()
		s.send(h, s.busyFrame(*refusal))
		s.renewNow()

		return
	}
	s.send(h, acceptedFrame())
	s.run(ctx, h)
}

// claim puts a claim of ours in the place of the one that the request's terms
// allow to replace [CLAIM-1]. It returns why it could not.
func (s *Server) claim(ctx context.Context, h *held) *driverv1.BusyReason {
	subject, err := claimSubject(h.cluster, s.cfg.Provider, h.machine)
	if err != nil {
		return s.unclaimed(h, err) // check has seen to it that this does not happen
	}
	terms := h.request.GetClaimTerms()
	if terms.Sequence == nil {
		return s.unclaimed(h, errConflict) // it is not ours, or it would have been found
	}
	env := s.claimEnvelope(h, driverv1.Claim_STATE_RUNNING)
	// Not cut short by a deadline or a cancel: then it would not be known whether it is there.
	seq, err := s.ledger(h.cluster).put(context.WithoutCancel(ctx), subject, env, terms.GetSequence(), 0)
	if err == nil {
		s.mu.Lock()
		h.firstClaim = seq
		s.claimIs(h, seq)
		s.mu.Unlock()
	}

	return s.unclaimed(h, err)
}

// An ackedClaim is the highest sequence that a stream has acknowledged to this replica.
type ackedClaim struct {
	sequence uint64
	made     time.Time // when the stream was made
}

// claimIs notes the sequence of an operation's newest record. Server.mu is held.
func (s *Server) claimIs(h *held, sequence uint64) {
	h.claim = sequence
	made := h.request.GetClaimTerms().GetStreamMade()
	if !made.IsValid() {
		return
	}
	switch highest := s.highest[h.cluster]; {
	case made.AsTime().After(highest.made):
		s.highest[h.cluster] = ackedClaim{sequence, made.AsTime()}
	case made.AsTime().Equal(highest.made):
		s.highest[h.cluster] = ackedClaim{max(sequence, highest.sequence), highest.made}
	}
}

// unclaimed makes a refusal of why a claim could not be written, nil of nil.
func (s *Server) unclaimed(h *held, err error) *driverv1.BusyReason {
	reason := driverv1.BusyReason_BUSY_REASON_STORE
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errConflict):
		reason = driverv1.BusyReason_BUSY_REASON_CLAIM
	default:
		// The request's number: h's own may change meanwhile.
		s.log.Warn("operation not claimed", "operation_id", h.id, "attempt", h.request.GetAttempt(), "err", err)
	}

	return &reason
}

// claimEnvelope is the record of a held operation. Its fields that change are
// read under Server.mu.
func (s *Server) claimEnvelope(h *held, state driverv1.Claim_State) *driverv1.Envelope {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := &driverv1.Claim{
		OperationId: h.id, Attempt: h.attempt, Operation: h.operation, Namespace: h.namespace, Name: h.name,
		Provider: s.cfg.Provider, Replica: s.cfg.Replica, Epoch: h.request.GetEpoch(),
		State: state, ClaimedAt: timestamppb.New(h.started),
	}
	if !h.ended.IsZero() {
		c.EndedAt = timestamppb.New(h.ended)
	}

	return &driverv1.Envelope{OperationId: h.id, Attempt: h.attempt, Replica: s.cfg.Replica, Body: &driverv1.Envelope_Claim{Claim: c}}
}

// storeOutcome writes what came of an operation in the place of its claim
// [CLAIM-5], without waiting: mcm, if it is there, has the result sooner.
func (s *Server) storeOutcome(h *held, result *driverv1.Result) {
	state := driverv1.Claim_STATE_SETTLED
	if result.GetOutcomeUnknown() {
		state = driverv1.Claim_STATE_RELEASED
	}
	env := s.claimEnvelope(h, state)
	if state == driverv1.Claim_STATE_SETTLED {
		env.GetClaim().Outcome = s.outcome(h, result)
	}
	s.mu.Lock()
	expected := h.claim
	h.storedAt = time.Now()
	s.mu.Unlock()
	subject, err := claimSubject(h.cluster, s.cfg.Provider, h.machine)
	var m *nats.Msg
	if err == nil {
		m, err = message(subject, env, expected, 0)
	}
	if err == nil {
		_, err = s.inquirer.send(m, func(answer *nats.Msg) { s.onOutcomeStored(h, expected, answer) })
	}
	if err != nil {
		s.log.Debug("outcome not stored yet", "operation_id", h.id, "err", err)
	}
}

func (s *Server) onOutcomeStored(h *held, replaced uint64, answer *nats.Msg) {
	seq, err := ackOf(answer)
	_, final := conflictOf(err) // what conflicts with a write under way may yet be stored
	if awaited := s.noteOutcome(h, replaced, seq, final, err); awaited != nil {
		s.send(h, resultFrame(awaited))
	}
}

// noteOutcome notes how the stream has answered an outcome. It returns the result if
// whoever asked for it waits for that.
func (s *Server) noteOutcome(h *held, replaced, seq uint64, final bool, err error) (awaited *driverv1.Result) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer func() {
		if h.stored && h.known && s.held[h.key()] == h {
			delete(s.held, h.key())
		}
	}()
	switch {
	case err == nil:
		if !h.counts() {
			awaited = h.result
		}
		h.stored = true
		s.claimIs(h, seq)
		signal(s.acked)
	case final && !h.stored && h.claim == replaced:
		// Another attempt has taken our claim's place, or an acknowledgement was
		// lost. Either way there is nothing more to write.
		h.stored, h.fenced = true, true
		if h.askedAgain && s.held[h.key()] == h {
			delete(s.held, h.key()) // who waits for it asks, and finds what is stored
		}
		s.log.Info("outcome not stored: the claim is not this attempt's any more", "operation_id", h.id, "attempt", h.attempt)
	default:
		s.log.Debug("outcome not stored yet", "operation_id", h.id, "err", err)
	}

	return awaited
}

// storeOutcomes tries again what could not be stored.
func (s *Server) storeOutcomes(cluster string) {
	now := time.Now()
	again := map[*held]*driverv1.Result{}
	s.mu.Lock()
	for _, h := range s.held {
		if h.cluster == cluster && Mutates(h.operation) && h.result != nil && !h.stored && now.Sub(h.storedAt) > storeAgain {
			again[h] = h.result
		}
	}
	s.mu.Unlock()
	for h, result := range again {
		s.storeOutcome(h, result)
	}
}
