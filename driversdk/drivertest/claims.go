package drivertest

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"google.golang.org/protobuf/proto"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func (s *suite) claimSubject(m *machine) string {
	return s.below("claim." + s.cfg.Provider + "." + m.GetUid())
}

// finish lets a pending operation go on and returns its result.
func (s *suite) finish(ctx context.Context, p *pending) (*driverv1.Result, error) {
	p.release()
	result, err := p.result(ctx, s.late())
	if err == nil && !result.GetOutcomeUnknown() {
		s.acknowledge(p.id)
	}

	return result, err
}

// fail lets a pending operation go on without a class to be had: it fails with nothing
// begun.
func (s *suite) fail(ctx context.Context, p *pending) (*driverv1.Result, error) {
	undo := s.fetches.alter(func(f *fetches) { f.away = true })
	defer undo()

	return s.finish(ctx, p)
}

// checkClaims holds the claim of an operation that runs against its request.
func checkClaims(ctx context.Context, s *suite) error {
	p, err := s.begin(ctx, remove)
	if err != nil {
		return err
	}
	defer p.release()
	_, env, err := s.record(ctx, s.claimSubject(p.m))
	if err != nil {
		return err
	}
	if _, err := s.finish(ctx, p); err != nil {
		return err
	}
	claim := env.GetClaim()
	want := &driverv1.Claim{
		OperationId: p.id, Attempt: p.attempt, Operation: remove, Namespace: p.m.GetNamespace(), Name: p.m.GetName(),
		Provider: s.cfg.Provider, Replica: s.target, Epoch: s.epoch, State: driverv1.Claim_STATE_RUNNING,
		ClaimedAt: claim.GetClaimedAt(), // left alone
	}
	if !proto.Equal(claim, want) {
		return fmt.Errorf("operation %s was accepted, and the claim on its machine is {%v}, not {%v}", p.id, claim, want)
	}

	return nil
}

// claimsOf returns what was written about an operation to its machine's claim, in one
// state.
func (s *suite) claimsOf(id string, state driverv1.Claim_State) []claimed {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []claimed
	for _, c := range s.claimed {
		if c.GetClaim().GetOperationId() == id && c.GetClaim().GetState() == state {
			found = append(found, c)
		}
	}

	return found
}

func checkTerms(ctx context.Context, s *suite) error {
	m := s.newMachine()
	for range 1 + s.cfg.Repeat { // the first replaces nothing, each other one its predecessor's outcome
		id := m.operation(remove)
		var terms string
		result, err := s.attempt(ctx, m, id, s.deleteBody(m), func(env *driverv1.Envelope) {
			terms = strconv.FormatUint(env.GetClaimTerms().GetSequence(), 10)
		})
		if err != nil {
			return err
		}
		var found []claimed
		if err := s.eventually(ctx, "operation "+id+" is claimed", func() (bool, error) {
			found = s.claimsOf(id, driverv1.Claim_STATE_RUNNING)

			return len(found) > 0, nil
		}); err != nil {
			return err
		}
		if last := found[len(found)-1]; last.expected != terms {
			return fmt.Errorf("the request allows to replace sequence %s, and the claim expected %q", terms, last.expected)
		}
		if err := s.endStored(ctx, m, id, result); err != nil {
			return err
		}
	}

	return nil
}

// unfit are terms that no claim in the stream fits: streams begin far above it.
func unfit() *driverv1.ClaimTerms { return &driverv1.ClaimTerms{Sequence: proto.Uint64(1)} }

// refusedClaim sends a mutation with terms by which it cannot be claimed.
func (s *suite) refusedClaim(
	ctx context.Context, m *machine, id string, body *driverv1.Envelope, terms *driverv1.ClaimTerms,
) (frame, error) {
	r, err := s.mutation(ctx, m, id, body)
	if err != nil {
		return frame{}, err
	}
	r.env.ClaimTerms = terms
	x, err := s.send(r)
	if err != nil {
		return frame{}, err
	}

	return x.first(ctx, s.cfg.Patience)
}

func checkRefusedClaim(ctx context.Context, s *suite) error {
	for _, terms := range []struct {
		what string
		*driverv1.ClaimTerms
	}{
		{"terms that do not hold", unfit()},
		{"terms without a sequence, for an operation that it does not have,", &driverv1.ClaimTerms{}},
	} {
		m := s.newMachine()
		f, err := s.refusedClaim(ctx, m, m.operation(remove), s.deleteBody(m), terms.ClaimTerms)
		if err != nil {
			return err
		}
		if f.GetBusy().GetReason() != driverv1.BusyReason_BUSY_REASON_CLAIM {
			return fmt.Errorf("%s were answered %s, not busy (BUSY_REASON_CLAIM)", terms.what, describe(f))
		}
	}
	if err := s.refuse(ctx); err != nil {
		return err
	}
	m := s.newMachine()
	f, err := s.refusedClaim(ctx, m, m.operation(remove), s.deleteBody(m), &driverv1.ClaimTerms{Sequence: proto.Uint64(0)})
	if err := errors.Join(s.restore(ctx), err); err != nil {
		return err
	}
	if f.GetBusy().GetReason() != driverv1.BusyReason_BUSY_REASON_STORE {
		return fmt.Errorf("a delete, while the operations stream takes no claims, was answered %s, not busy (BUSY_REASON_STORE)", describe(f))
	}

	return nil
}

func checkNoTerms(ctx context.Context, s *suite) error {
	m := s.newMachine()
	f, err := s.refusedClaim(ctx, m, m.operation(create), s.createBody(m), nil)
	if err != nil {
		return err
	}
	if f.GetResult().GetStatus().GetCode() != driverv1.Code_CODE_INVALID_ARGUMENT {
		return fmt.Errorf("a create without claim_terms was answered %s, not InvalidArgument", describe(f))
	}

	return s.none(ctx, m, "the create had no claim_terms")
}

func checkNoClaimNoCall(ctx context.Context, s *suite) error {
	m := s.newMachine()
	f, err := s.refusedClaim(ctx, m, m.operation(create), s.createBody(m), unfit())
	if err != nil {
		return err
	}
	if err := s.none(ctx, m, "the create could not be claimed"); err != nil {
		return err
	}
	if f.GetBusy() == nil {
		return fmt.Errorf("a create that could not be claimed was answered %s, not busy", describe(f))
	}

	return nil
}
