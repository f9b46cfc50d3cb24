package drivertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// checkAttach asks for operations that the replica has already: one that runs, one whose
// result it keeps, one that failed before another attempt, and one that another attempt
// has superseded.
func checkAttach(ctx context.Context, s *suite) error {
	if err := s.attaches(ctx); err != nil {
		return fmt.Errorf("asked for an operation that runs: %w", err)
	}
	d, err := s.onceInVain(ctx, remove)
	if err != nil {
		return err
	}
	if err := s.repeated(ctx, d); err != nil {
		return fmt.Errorf("a result that is kept: %w", err)
	}
	s.acknowledge(d.id)
	if err := s.outdated(ctx); err != nil {
		return fmt.Errorf("a failure that is kept, asked for by a later attempt while the call of one in between may run: %w", err)
	}
	if err := s.attachesToRecords(ctx); err != nil {
		return fmt.Errorf("a result that is kept, asked for by the sequence of a record of its claim: %w", err)
	}
	if err := s.superseded(ctx); err != nil {
		return fmt.Errorf("with another replica's attempt in between: %w", err)
	}

	return nil
}

// askAgain asks for a create that runs, by a request that differs, and waits for the
// word that the replica has it.
func (s *suite) askAgain(ctx context.Context, p *pending, change func(*driverv1.Envelope)) (*exchange, error) {
	r, err := s.mutation(ctx, p.m, p.id, s.createBody(p.m))
	if err != nil {
		return nil, err
	}
	change(r.env)
	x, err := s.send(r)
	if err == nil {
		err = x.acceptedFrame(ctx)
	}

	return x, err
}

// attaches asks for a running operation by later attempts, whose frames they are from
// then on.
func (s *suite) attaches(ctx context.Context) error {
	p, err := s.begin(ctx, create)
	if err != nil {
		return err
	}
	defer p.release()
	x, err := s.askAgain(ctx, p, recovering)
	if err != nil {
		return err
	}
	if x, err = s.askAgain(ctx, p, func(env *driverv1.Envelope) {
		env.Recover, env.Attempt, env.ClaimTerms = true, x.attempt+1, &driverv1.ClaimTerms{}
	}); err != nil {
		return fmt.Errorf("by a request that leaves the sequence of its claim unset: %w", err)
	}
	p.release()
	result, err := x.result(ctx, s.late())
	if err != nil {
		return err
	}
	instance, err := createdOf(result)
	if err != nil {
		return err
	}
	both := s.alsoEarlier(ctx, p)
	s.acknowledge(p.id)
	s.mu.Lock()
	misnumbered := x.misnumbered
	s.mu.Unlock()
	switch {
	case both:
		return errors.New("the result went to the earlier reply subject as well")
	case misnumbered:
		return fmt.Errorf("a frame does not say attempt %d, which is the one that asked last", x.attempt)
	default:
		return s.one(ctx, p.m, instance.GetProviderId())
	}
}

// alsoEarlier tells whether a result came to where the operation was asked for
// first. One that was made a second time may come a moment after the other.
func (s *suite) alsoEarlier(ctx context.Context, p *pending) bool {
	const moment, look = 500 * time.Millisecond, 20 * time.Millisecond
	for range moment / look {
		s.mu.Lock()
		n := p.results
		s.mu.Unlock()
		if n > 0 {
			return true
		}
		if pause(ctx, look) != nil {
			return false
		}
	}

	return false
}

// attachesToRecords asks for later attempts at a create, each by another sequence at
// which its claim has been: mcm may have read any of them.
func (s *suite) attachesToRecords(ctx context.Context) error {
	d, err := s.once(ctx, create)
	if err != nil {
		return err
	}
	if _, err := s.endOfClaim(ctx, d.m, d.id); err != nil {
		return err
	}
	later := slices.Concat(s.claimsOf(d.id, driverv1.Claim_STATE_BEGUN), s.claimsOf(d.id, driverv1.Claim_STATE_SETTLED))
	for n, c := range later { // each expected the sequence of the one before
		sequence, err := strconv.ParseUint(c.expected, 10, 64)
		if err != nil {
			return nil //nolint:nilerr // which is another clause's to blame
		}
		again, err := s.try(ctx, d.m, d.id, d.body(d.m), func(env *driverv1.Envelope) {
			env.Recover, env.Attempt, env.ClaimTerms = true, uint32(n)+2, &driverv1.ClaimTerms{Sequence: &sequence}
		})
		switch {
		case err != nil:
			return fmt.Errorf("as it was before it was %s: %w", c.GetClaim().GetState(), err)
		case s.claimedTimes(d.id) != 1:
			return fmt.Errorf("as it was before it was %s: its operation was run again", c.GetClaim().GetState())
		case !proto.Equal(again, d.result):
			return fmt.Errorf("as it was before it was %s: it was %s, after %s", c.GetClaim().GetState(), said(again), said(d.result))
		}
	}
	s.acknowledge(d.id)

	return nil
}

// outdated has a create fail, and asks for a later attempt at it while one in between
// may run.
func (s *suite) outdated(ctx context.Context) error {
	d, err := s.onceInVain(ctx, create)
	if err != nil || d.result.GetStatus().GetCode() == driverv1.Code_CODE_OK { // it needs no class
		return err
	}
	// Terms with a sequence that the replica has not heard of yet would name another claim.
	if _, err := s.endOfClaim(ctx, d.m, d.id); err != nil {
		return nil //nolint:nilerr // which is another clause's to blame
	}
	if err := s.newerThan(ctx, s.session().GetSequence()); err != nil {
		return err
	}
	result, err := s.attempt(ctx, d.m, d.id, d.body(d.m), doubting)
	if err != nil || result.GetOutcomeUnknown() { // the stream may not have answered in time
		return err
	}
	_, err = createdOf(result)

	return err
}

// superseded asks for a third attempt after a second one of another replica: the first is
// no answer to that, neither while it runs nor when it has ended.
func (s *suite) superseded(ctx context.Context) error {
	p, err := s.begin(ctx, remove)
	if err != nil {
		return err
	}
	defer p.release()
	if _, err := s.usurp(ctx, p.m); err != nil {
		return err
	}
	third := func() (*exchange, error) {
		r, err := s.mutation(ctx, p.m, p.id, s.deleteBody(p.m))
		if err != nil {
			return nil, err
		}
		r.env.Recover, r.env.Attempt = true, 3

		return s.send(r)
	}
	x, err := third()
	if err != nil {
		return err
	}
	f, err := x.first(ctx, s.cfg.Patience)
	switch {
	case err != nil:
		return err
	case f.GetBusy().GetReason() != driverv1.BusyReason_BUSY_REASON_MACHINE:
		return fmt.Errorf("a request for the third attempt, while the first runs, was answered %s, not busy (BUSY_REASON_MACHINE)", describe(f))
	}
	p.release()
	if _, err := p.result(ctx, s.late()); err != nil {
		return err
	}
	if err := s.eventually(ctx, "the replica takes the third attempt", func() (bool, error) {
		if x, err = third(); err == nil {
			_, err = x.result(ctx, s.late())
		}
		if _, busy := errors.AsType[*busyError](err); busy {
			return false, nil
		}

		return err == nil, err
	}); err != nil {
		return err
	}
	s.acknowledge(p.id)
	if s.eventually(ctx, "", func() (bool, error) {
		return slices.ContainsFunc(s.claimsOf(p.id, driverv1.Claim_STATE_RUNNING),
			func(c claimed) bool { return c.GetClaim().GetAttempt() == x.attempt }), nil
	}) != nil {
		return errors.New("a request for the third attempt was answered with the result of the first")
	}

	return nil
}
