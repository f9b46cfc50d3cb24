package drivertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func (s *suite) claimSubject(m *machine) string {
	return s.below("claim." + s.cfg.Provider + "." + m.GetUid())
}

func (s *suite) sessionSubject() string {
	return s.below("session." + s.cfg.Provider + "." + s.target)
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

func checkClaims(ctx context.Context, s *suite) error {
	if err := s.claimTells(ctx); err != nil {
		return err
	}
	if err := s.bury(ctx); err != nil {
		return err
	}
	if err := s.claimTells(ctx); err != nil {
		return fmt.Errorf("after a tombstone was put in the place of its session: %w", err)
	}

	return nil
}

// claimTells holds the claim of an operation that runs against its request and the
// replica's session.
func (s *suite) claimTells(ctx context.Context) error {
	since := s.session().GetSequence()
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
		SessionId: claim.GetSessionId(), ClaimedAt: claim.GetClaimedAt(), // looked at below, and left alone
	}
	if !proto.Equal(claim, want) {
		return fmt.Errorf("operation %s was accepted, and the claim on its machine is {%v}, not {%v}", p.id, claim, want)
	}
	if s.eventually(ctx, "", func() (bool, error) {
		return slices.ContainsFunc(s.sessionsOf(s.target), func(other session) bool {
			return other.GetSequence() >= since && other.GetSessionId() == claim.GetSessionId()
		}), nil
	}) != nil {
		return fmt.Errorf("the claim says session_id %q, and the replica's sessions say %q", claim.GetSessionId(), s.session().GetSessionId())
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

	return nil
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

// bury puts a tombstone in the place of the replica's session and returns when it
// has gone on under another session_id.
func (s *suite) bury(ctx context.Context) error {
	var before *driverv1.Session // in the stream, which may be ahead of what was heard
	if err := s.eventually(ctx, "a tombstone is in the place of the replica's session", func() (bool, error) {
		sequence, env, err := s.record(ctx, s.sessionSubject())
		if err != nil || sequence == 0 {
			return false, err
		}
		before = env.GetSession()

		return s.replace(ctx, s.sessionSubject(), &driverv1.Envelope{Body: &driverv1.Envelope_Tombstone{
			Tombstone: &driverv1.Tombstone{
				Cluster: s.cfg.Cluster, Provider: s.cfg.Provider, Replica: s.target, Epoch: s.epoch,
				SessionId: before.GetSessionId(), Sequence: before.GetSequence(), WrittenAt: timestamppb.Now(),
			},
		}}, sequence)
	}); err != nil {
		return err
	}
	if s.eventually(ctx, "", func() (bool, error) {
		now := s.session()

		return now.GetSequence() > before.GetSequence() && now.GetSessionId() != before.GetSessionId() && now.GetLeased(), nil
	}) != nil {
		return fmt.Errorf("a tombstone is in the place of its session, and the replica does not go on under another session_id than %q",
			before.GetSessionId())
	}

	return nil
}

// buried is the end of an operation whose replica is taken for dead while it is held up.
func (s *suite) buried(ctx context.Context, begin func() (*pending, error)) (*pending, *driverv1.Result, error) {
	p, err := begin()
	if err != nil {
		return nil, nil, err
	}
	defer p.release()
	if err := s.bury(ctx); err != nil {
		return nil, nil, err
	}
	result, err := s.finish(ctx, p)

	return p, result, err
}

// fenced is the end of an operation that must have started nothing.
func (s *suite) fenced(ctx context.Context, p *pending, result *driverv1.Result) error {
	if result.GetStatus().GetCode() == driverv1.Code_CODE_OK {
		return errors.New("a create that was accepted before was carried out all the same")
	}

	return s.none(ctx, p.m, "the replica had to start nothing for the create")
}

func checkTombstone(ctx context.Context, s *suite) error {
	p, result, err := s.buried(ctx, func() (*pending, error) { return s.begin(ctx, create) })
	if err != nil {
		return err
	}

	return s.fenced(ctx, p, result)
}

// checkLapsed keeps sessions from being stored until the lease must have lapsed. What
// was accepted before goes on without a lease, and then under the next one.
func checkLapsed(ctx context.Context, s *suite) error {
	for _, lapse := range []struct {
		what   string
		finish func(context.Context, *pending) (*driverv1.Result, error)
	}{
		{"while it has no lease", s.finishUnleased}, {"once its lease is back", s.finishLeasedAgain},
	} {
		p, err := s.begin(ctx, create)
		if err != nil {
			return err
		}
		result, err := lapse.finish(ctx, p)
		p.release()
		if err == nil {
			err = s.fenced(ctx, p, result)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", lapse.what, err)
		}
	}

	return nil
}

// finishUnleased takes the operations stream away, and lets an operation go on then.
func (s *suite) finishUnleased(ctx context.Context, p *pending) (*driverv1.Result, error) {
	if err := s.streamAPI(ctx, "DELETE", nil, nil); err != nil {
		return nil, err
	}
	lapsed := s.lapsed(ctx)
	result, err := s.finish(ctx, p)

	return result, errors.Join(s.restore(ctx), lapsed, err)
}

// finishLeasedAgain has the stream take no sessions for a while, and lets an operation
// go on when it takes them again: to the replica nothing else has happened.
func (s *suite) finishLeasedAgain(ctx context.Context, p *pending) (*driverv1.Result, error) {
	if err := s.takeOnly(ctx, "claim"); err != nil {
		return nil, err
	}
	lapsed := s.lapsed(ctx)
	if err := errors.Join(s.restore(ctx), lapsed); err != nil {
		return nil, err
	}

	return s.finish(ctx, p)
}

func (s *suite) lapsed(ctx context.Context) error {
	return s.eventually(ctx, "the replica says that it is not leased any more",
		func() (bool, error) { return !s.session().GetLeased(), nil })
}

func checkFencedCall(ctx context.Context, s *suite) error {
	p, result, err := s.buried(ctx, func() (*pending, error) { return s.atCloud(ctx, s.cfg.Timeout) })
	if err != nil {
		return err
	}
	instance, err := createdOf(result)
	if err != nil {
		return fmt.Errorf("a create that was at the cloud when its replica was taken for dead: %w", err)
	}
	if err := s.one(ctx, p.m, instance.GetProviderId()); err != nil {
		return err
	}
	if err := s.overtaken(ctx); err != nil {
		return fmt.Errorf("a create that was at the cloud when its replica was taken for dead, and that is asked for again: %w", err)
	}

	return nil
}

// sessionTTL is what a renewal must ask for.
const sessionTTL = 3 * time.Second

// checkRenewal looks at several renewals: one that was sent before the answer to the
// one before had come expects what it knows of, and that is in order.
func checkRenewal(ctx context.Context, s *suite) (err error) {
	const looks = 3
	for range looks {
		if err = checkOneRenewal(ctx, s); err == nil || ctx.Err() != nil {
			return err
		}
		if late := s.newerThan(ctx, s.session().GetSequence()); late != nil { // or it would be the same look
			return late
		}
	}

	return err
}

func checkOneRenewal(ctx context.Context, s *suite) error {
	sequence, env, err := s.record(ctx, s.sessionSubject())
	if err != nil {
		return err
	}
	var next session
	if err := s.eventually(ctx, "the next session comes", func() (bool, error) {
		for _, next = range s.sessionsOf(s.target) {
			if next.GetSequence() > env.GetSession().GetSequence() {
				return true, nil
			}
		}

		return false, nil
	}); err != nil {
		return err
	}
	if next.reply == "" {
		return errors.New("a session has no reply subject for the stream's acknowledgement")
	}
	if next.expected != strconv.FormatUint(sequence, 10) {
		return fmt.Errorf("a session expects sequence %q, and that of the one before is %d", next.expected, sequence)
	}
	ttl, err := time.ParseDuration(strings.TrimSuffix(next.ttl, "s") + "s")
	if err != nil || ttl != sessionTTL {
		return fmt.Errorf("a session has TTL %q, not %s", next.ttl, sessionTTL)
	}

	return nil
}
