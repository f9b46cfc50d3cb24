package drivertest

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// checkOutcomeStored ends attempts in every way there is, and looks at what is in the
// place of their claims: whoever leads next knows no more of them.
func checkOutcomeStored(ctx context.Context, s *suite) error {
	for _, end := range []struct {
		what  string
		check func(context.Context) error
	}{
		{"a create", s.storesSuccess},
		{"an operation that failed", s.storesFailure},
		{"a create of unknown outcome", s.storesUnknown},
		{"an operation whose claim is another replica's by now", s.sparesOthers},
		{"an operation whose outcome was not stored at once", s.storesLater},
	} {
		if err := end.check(ctx); err != nil {
			return fmt.Errorf("%s: %w", end.what, err)
		}
	}

	return s.witnessed("CLAIM-5")
}

func (s *suite) storesSuccess(ctx context.Context) error {
	m := s.newMachine()
	id := m.operation(create)
	result, err := s.run(ctx, m, id, s.createBody(m))
	if err != nil {
		return err
	}
	if _, err := createdOf(result); err != nil && !result.GetOutcomeUnknown() { // the stream may not have answered in time
		return err
	}

	return s.endStored(ctx, m, id, result)
}

// storesFailure has a delete fail for want of the class.
func (s *suite) storesFailure(ctx context.Context) error {
	m := s.newMachine()
	id := m.operation(remove)
	undo := s.fetches.alter(func(f *fetches) { f.away = true })
	result, err := s.run(ctx, m, id, s.deleteBody(m))
	undo()
	if err != nil {
		return err
	}

	return s.endStored(ctx, m, id, result)
}

// storesUnknown has a create fail before it can look for what an earlier attempt has
// made.
func (s *suite) storesUnknown(ctx context.Context) error {
	m := s.newMachine()
	id := m.operation(create)
	undo := s.fetches.alter(func(f *fetches) { f.away = true })
	result, err := s.attempt(ctx, m, id, s.createBody(m), recovering)
	undo()
	if err != nil {
		return err
	}

	return s.endStored(ctx, m, id, result)
}

// sparesOthers puts another replica's claim in the place of that of a running
// operation.
func (s *suite) sparesOthers(ctx context.Context) error {
	p, err := s.begin(ctx, remove)
	if err != nil {
		return err
	}
	defer p.release()
	sequence, err := s.usurp(ctx, p.m)
	if err != nil {
		return err
	}
	result, err := s.fail(ctx, p)
	if err != nil {
		return err
	}
	if err := s.triesToStore(ctx, p.id, result); err != nil {
		return err
	}
	// The stream takes this after what the replica has sent.
	_, env, err := s.record(ctx, s.claimSubject(p.m))
	if err != nil {
		return err
	}
	untouched, err := s.replace(ctx, s.claimSubject(p.m), env, sequence)
	if err == nil && !untouched {
		err = errors.New("the outcome was put in the place of another replica's claim")
	}

	return err
}

// triesToStore waits until the replica has sent the outcome of an operation to the
// stream.
func (s *suite) triesToStore(ctx context.Context, id string, result *driverv1.Result) error {
	return s.eventually(ctx, "the replica tries to store the outcome of operation "+id, func() (bool, error) {
		return len(s.claimsOf(id, endOf(result))) > 0, nil
	})
}

// usurp puts a claim of another replica in the place of the one on a machine and
// returns its sequence.
func (s *suite) usurp(ctx context.Context, m *machine) (uint64, error) {
	subject := s.claimSubject(m)
	sequence, env, err := s.record(ctx, subject)
	if err != nil {
		return 0, err
	}
	env.GetClaim().Attempt, env.GetClaim().Replica = env.GetClaim().GetAttempt()+1, "conformance"
	if stored, err := s.replace(ctx, subject, env, sequence); err != nil || !stored {
		return 0, errors.Join(err, errors.New("the claim of a running operation could not be replaced"))
	}
	sequence, _, err = s.record(ctx, subject)

	return sequence, err
}

// storesLater keeps the stream from taking the outcome of an operation until its
// result was acknowledged.
func (s *suite) storesLater(ctx context.Context) error {
	p, err := s.begin(ctx, remove)
	if err != nil {
		return err
	}
	defer p.release()
	if err := s.refuse(ctx); err != nil {
		return err
	}
	result, err := s.fail(ctx, p)
	if err == nil {
		err = s.triesToStore(ctx, p.id, result)
	}
	if err == nil {
		_, err = s.ops(ctx, "", 0) // behind the acknowledgement
	}
	if back := s.restore(ctx); back != nil {
		return back
	}
	if err != nil {
		return err
	}

	return s.endStored(ctx, p.m, p.id, result)
}

// recovering makes a request one for another attempt, after one that may have had an
// effect.
func recovering(env *driverv1.Envelope) { env.Recover, env.Attempt = true, 2 }

// endOf is the state of a claim whose attempt ended with a result.
func endOf(result *driverv1.Result) driverv1.Claim_State {
	if result.GetOutcomeUnknown() {
		return driverv1.Claim_STATE_RELEASED
	}

	return driverv1.Claim_STATE_SETTLED
}

// endOfClaim waits until an operation's claim tells that it has ended.
func (s *suite) endOfClaim(ctx context.Context, m *machine, id string) (claim *driverv1.Claim, err error) {
	err = s.eventually(ctx, "the end of operation "+id+" is stored", func() (bool, error) {
		_, env, err := s.record(ctx, s.claimSubject(m))
		claim = env.GetClaim()

		ended := claim.GetState() == driverv1.Claim_STATE_SETTLED || claim.GetState() == driverv1.Claim_STATE_RELEASED

		return claim.GetOperationId() == id && ended, err
	})

	return claim, err
}

// endStored waits until the claim of an operation tells how it ended, and holds that
// against its result.
func (s *suite) endStored(ctx context.Context, m *machine, id string, result *driverv1.Result) error {
	claim, err := s.endOfClaim(ctx, m, id)
	if err != nil {
		return err
	}
	if want := endOf(result); claim.GetState() != want {
		return fmt.Errorf("the result was %s, and the claim says %s, not %s", said(result), claim.GetState(), want)
	}
	have, want := proto.CloneOf(claim.GetOutcome()), outcomeOf(result)
	if have != nil {
		have.Sealed = nil
	}
	if !proto.Equal(have, want) {
		return fmt.Errorf("the stored outcome is {%v}, and after the result it is to be {%v}", have, want)
	}
	s.leak("CLAIM-5", "a stored outcome", claim.GetOutcome().String())
	if sealed := claim.GetOutcome().GetSealed(); sealed != nil {
		return s.opens(sealed, id, result)
	}

	return nil
}

// outcomeOf is what is to be stored of a result in clear; nil when nobody knows it.
func outcomeOf(r *driverv1.Result) *driverv1.Outcome {
	if r.GetOutcomeUnknown() {
		return nil
	}
	instance := r.GetCreate().GetInstance()
	if instance == nil {
		instance = r.GetInitialize().GetInstance()
	}

	return &driverv1.Outcome{
		Code: r.GetStatus().GetCode(), RetryAfter: r.GetStatus().GetRetryAfter(),
		ProviderId: instance.GetProviderId(), NodeName: instance.GetNodeName(), Addresses: instance.GetAddresses(),
	}
}

// opens holds what was sealed of an outcome against the result.
func (s *suite) opens(sealed *driverv1.Sealed, id string, result *driverv1.Result) error {
	have := &driverv1.SealedOutcome{}
	if err := s.fetches.key.Open(sealed, sealed.GetSender(), have); err != nil {
		return fmt.Errorf("what was sealed of the outcome does not open: %w", err)
	}
	state := result.GetCreate().GetLastKnownState() + result.GetInitialize().GetLastKnownState() + result.GetDelete().GetLastKnownState()
	if have.GetOperationId() != id || have.GetMessage() != result.GetStatus().GetMessage() || have.GetLastKnownState() != state {
		return errors.New("what was sealed of the outcome is of another operation, or not what the result said")
	}

	return nil
}
