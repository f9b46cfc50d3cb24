package drivertest

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
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
	p, err := s.begin(ctx, driverv1.Operation_OPERATION_DELETE)
	if err != nil {
		return err
	}
	defer p.release()
	_, env, err := s.record(ctx, s.claimSubject(p.m))
	if err != nil {
		return err
	}
	claim := env.GetClaim()
	if _, err := s.finish(ctx, p); err != nil {
		return err
	}
	if claim.GetOperationId() != p.id || claim.GetReplica() != s.target || claim.GetAttempt() != p.attempt ||
		claim.GetState() != driverv1.Claim_STATE_RUNNING {
		return fmt.Errorf("operation %s was accepted, and the claim on its machine is of operation %q, attempt %d, replica %q, %s",
			p.id, claim.GetOperationId(), claim.GetAttempt(), claim.GetReplica(), claim.GetState())
	}

	return nil
}

// claimsOf returns what was written to claim for an operation.
func (s *suite) claimsOf(id string) []claimed {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []claimed
	for _, c := range s.claimed {
		if c.GetClaim().GetOperationId() == id && c.GetClaim().GetState() == driverv1.Claim_STATE_RUNNING {
			found = append(found, c)
		}
	}

	return found
}

func checkTerms(ctx context.Context, s *suite) error {
	m := s.newMachine()
	for range 1 + s.cfg.Repeat { // the first replaces nothing, each other one its predecessor's outcome
		id := m.operation(driverv1.Operation_OPERATION_DELETE)
		var terms string
		if _, err := s.attempt(ctx, m, id, s.deleteBody(m), func(env *driverv1.Envelope) {
			terms = strconv.FormatUint(env.GetClaimTerms().GetSequence(), 10)
		}); err != nil {
			return err
		}
		if err := s.eventually(ctx, "operation "+id+" is claimed", func() (bool, error) { return len(s.claimsOf(id)) > 0, nil }); err != nil {
			return err
		}
		found := s.claimsOf(id)
		if last := found[len(found)-1]; last.expected != terms {
			return fmt.Errorf("the request allows to replace sequence %s, and the claim expected %q", terms, last.expected)
		}
		if err := s.outcomeStored(ctx, m, id, nil); err != nil {
			return err
		}
	}

	return nil
}

// refusedClaim sends a mutation whose terms do not fit what is in the stream.
func (s *suite) refusedClaim(ctx context.Context, m *machine, id string, body *driverv1.Envelope) (frame, error) {
	r, err := s.mutation(ctx, m, id, body)
	if err != nil {
		return frame{}, err
	}
	r.env.ClaimTerms = &driverv1.ClaimTerms{Sequence: proto.Uint64(1)} // streams begin far above it
	x, err := s.send(r)
	if err != nil {
		return frame{}, err
	}

	return x.first(ctx, s.cfg.Patience)
}

func checkRefusedClaim(ctx context.Context, s *suite) error {
	m := s.newMachine()
	f, err := s.refusedClaim(ctx, m, m.operation(driverv1.Operation_OPERATION_DELETE), s.deleteBody(m))
	if err == nil && f.GetBusy().GetReason() != driverv1.BusyReason_BUSY_REASON_CLAIM {
		err = fmt.Errorf("terms that do not hold were answered %s, not busy (BUSY_REASON_CLAIM)", describe(f))
	}

	return err
}

func checkNoClaimNoCall(ctx context.Context, s *suite) error {
	m := s.newMachine()
	f, err := s.refusedClaim(ctx, m, m.operation(create), s.createBody(m))
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

// outcomeStored waits until the claim of an operation tells its outcome.
func (s *suite) outcomeStored(ctx context.Context, m *machine, id string, instance *driverv1.Instance) error {
	var claim *driverv1.Claim
	err := s.eventually(ctx, "the outcome of operation "+id+" is stored", func() (bool, error) {
		_, env, err := s.record(ctx, s.claimSubject(m))
		claim = env.GetClaim()

		return claim.GetOperationId() == id && claim.GetState() == driverv1.Claim_STATE_SETTLED, err
	})
	if err == nil && claim.GetOutcome().GetProviderId() != instance.GetProviderId() {
		err = fmt.Errorf("the stored outcome names instance %q, the result %q", claim.GetOutcome().GetProviderId(), instance.GetProviderId())
	}
	if err == nil {
		s.leak("CLAIM-5", "a stored outcome", claim.GetOutcome().String())
		err = s.witnessed("CLAIM-5")
	}

	return err
}

func checkOutcomeStored(ctx context.Context, s *suite) error {
	m := s.newMachine()
	id := m.operation(create)
	result, err := s.run(ctx, m, id, s.createBody(m))
	if err != nil {
		return err
	}
	instance, err := createdOf(result)
	if err != nil {
		return err
	}
	if err := s.outcomeStored(ctx, m, id, instance); err != nil {
		return err
	}
	p, err := s.begin(ctx, driverv1.Operation_OPERATION_DELETE)
	if err != nil {
		return err
	}
	defer p.release()
	subject := s.claimSubject(p.m)
	sequence, env, err := s.record(ctx, subject)
	if err != nil {
		return err
	}
	env.GetClaim().Attempt, env.GetClaim().Replica = 2, "conformance"
	if stored, err := s.replace(ctx, subject, env, sequence); err != nil || !stored {
		return errors.Join(err, errors.New("the claim of a running operation could not be replaced"))
	}
	if sequence, _, err = s.record(ctx, subject); err != nil {
		return err
	}
	if _, err := s.finish(ctx, p); err != nil {
		return err
	}
	if _, err := s.list(ctx); err != nil { // behind whatever else it sends
		return err
	}
	now, _, err := s.record(ctx, subject)
	if err == nil && now != sequence {
		err = errors.New("the outcome was put in the place of another replica's claim")
	}

	return err
}

// bury puts a tombstone in the place of the replica's session and returns when it
// has gone on under another session_id.
func (s *suite) bury(ctx context.Context) error {
	before := s.session().GetSessionId()
	if err := s.eventually(ctx, "a tombstone is in the place of the replica's session", func() (bool, error) {
		sequence, env, err := s.record(ctx, s.sessionSubject())
		if err != nil || sequence == 0 {
			return false, err
		}

		return s.replace(ctx, s.sessionSubject(), &driverv1.Envelope{Body: &driverv1.Envelope_Tombstone{
			Tombstone: &driverv1.Tombstone{
				Cluster: s.cfg.Cluster, Provider: s.cfg.Provider, Replica: s.target, Epoch: s.epoch,
				SessionId: env.GetSession().GetSessionId(), Sequence: env.GetSession().GetSequence(), WrittenAt: timestamppb.Now(),
			},
		}}, sequence)
	}); err != nil {
		return err
	}
	if s.eventually(ctx, "", func() (bool, error) {
		now := s.session()

		return now.GetSessionId() != before && now.GetLeased(), nil
	}) != nil {
		return fmt.Errorf("a tombstone is in the place of its session, and the replica does not go on under another session_id than %q", before)
	}

	return nil
}

// fenced is the end of an operation that must have started nothing.
func (s *suite) fenced(ctx context.Context, p *pending, result *driverv1.Result) error {
	if result.GetStatus().GetCode() == driverv1.Code_CODE_OK {
		return errors.New("a create that was accepted before was carried out all the same")
	}

	return s.none(ctx, p.m, "the replica had to start nothing for the create")
}

func checkTombstone(ctx context.Context, s *suite) error {
	p, err := s.begin(ctx, create)
	if err != nil {
		return err
	}
	defer p.release()
	if err := s.bury(ctx); err != nil {
		return err
	}
	result, err := s.finish(ctx, p)
	if err != nil {
		return err
	}

	return s.fenced(ctx, p, result)
}

// checkLapsed takes the operations stream away until the lease must have lapsed.
func checkLapsed(ctx context.Context, s *suite) error {
	p, err := s.begin(ctx, create)
	if err != nil {
		return err
	}
	defer p.release()
	limit, cancel := context.WithTimeout(ctx, s.cfg.Patience)
	defer cancel()
	name := bus.StreamName(s.cfg.Cluster, s.cfg.Provider)
	if _, err := s.nc.RequestWithContext(limit, "$JS.API.STREAM.DELETE."+name, nil); err != nil {
		return fmt.Errorf("delete stream %s: %w", name, err)
	}
	var result *driverv1.Result
	lapsed := s.eventually(ctx, "the replica says that it is not leased any more",
		func() (bool, error) { return !s.session().GetLeased(), nil })
	result, err = s.finish(ctx, p)
	if back := s.restore(ctx); back != nil {
		return back
	}
	if err := errors.Join(lapsed, err); err != nil {
		return err
	}

	return s.fenced(ctx, p, result)
}

// restore has the operations stream made again and waits for the replica's lease.
func (s *suite) restore(ctx context.Context) error {
	s.caller.Close()
	if err := s.startCaller(); err != nil {
		return err
	}

	return s.meetReplica(ctx)
}

func checkFencedCall(ctx context.Context, s *suite) error {
	p, err := s.atCloud(ctx, s.cfg.Timeout)
	if err != nil {
		return err
	}
	defer p.release()
	if err := s.bury(ctx); err != nil {
		return err
	}
	result, err := s.finish(ctx, p)
	if err != nil {
		return err
	}
	instance, err := createdOf(result)
	if err != nil {
		return fmt.Errorf("a create that was at the cloud when its replica was taken for dead: %w", err)
	}

	return s.one(ctx, p.m, instance.GetProviderId())
}

func checkUnknownNotKept(ctx context.Context, s *suite) error {
	p, err := s.begin(ctx, create)
	if err != nil {
		return err
	}
	defer p.release()
	if err := s.bury(ctx); err != nil {
		return err
	}
	result, err := s.finish(ctx, p)
	if err != nil {
		return err
	}
	if !result.GetOutcomeUnknown() {
		return skipf("no operation ended with an unknown outcome")
	}
	held, err := s.ops(ctx, p.id, 0)
	if err == nil && len(held.GetOperations()) > 0 {
		err = errors.New("ops still tells of an operation that ended with an unknown outcome")
	}

	return err
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
