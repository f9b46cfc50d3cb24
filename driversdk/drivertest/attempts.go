package drivertest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/types/known/durationpb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A pending is a mutation that the driver has and cannot go on with, because its
// class is not answered.
type pending struct {
	*exchange

	m       *machine
	release func()
	timeout time.Duration // of one that is at the cloud
}

// errNotReached is what comes of a create whose time is over before the cloud has it.
var errNotReached = errors.New("the create did not reach the cloud in its time")

// begin sends a mutation whose class is held back and returns when the replica has
// accepted it and waits for the class. Release must be called.
func (s *suite) begin(ctx context.Context, op driverv1.Operation) (*pending, error) {
	return s.beginFor(ctx, s.newMachine(), op, func(*driverv1.Envelope) {})
}

// beginFor is begin for a given machine and with a changed envelope.
func (s *suite) beginFor(
	ctx context.Context, m *machine, op driverv1.Operation, change func(*driverv1.Envelope),
) (*pending, error) {
	p := &pending{m: m, release: s.fetches.hold()}
	id := p.m.operation(op)
	err := s.eventually(ctx, "the replica takes an operation", func() (bool, error) {
		body := s.deleteBody(p.m)
		if op == create {
			body = s.createBody(p.m)
		}
		r, err := s.mutation(ctx, p.m, id, body)
		if err != nil {
			return false, err
		}
		change(r.env)
		if p.exchange, err = s.send(r); err != nil {
			return false, err
		}
		err = p.acceptedFrame(ctx)
		if _, busy := errors.AsType[*busyError](err); busy {
			return false, nil
		}

		return err == nil, err
	})
	if err != nil {
		p.release()

		return nil, err
	}
	if s.eventually(ctx, "the driver asks for the class", func() (bool, error) { return s.fetches.held(), nil }) != nil {
		p.release()

		return nil, skipf("the driver does not ask for the class of an operation, by which the suite could hold it up")
	}

	return p, nil
}

func checkOneAtATime(ctx context.Context, s *suite) error {
	p, err := s.begin(ctx, create)
	if err != nil {
		return err
	}
	defer p.release()
	if err := s.refusesSecond(ctx, p.m); err != nil {
		return fmt.Errorf("while a create of the machine runs: %w", err)
	}
	p.release()
	_, err = p.result(ctx, s.late())
	s.acknowledge(p.id)

	return err
}

// refusesSecond asks for a delete of a machine that has a create running.
func (s *suite) refusesSecond(ctx context.Context, m *machine) error {
	r, err := s.mutation(ctx, m, m.operation(remove), s.deleteBody(m))
	if err != nil {
		return err
	}
	x, err := s.send(r)
	if err != nil {
		return err
	}
	f, err := x.first(ctx, s.cfg.Patience)
	if err == nil && f.GetBusy().GetReason() != driverv1.BusyReason_BUSY_REASON_MACHINE {
		err = fmt.Errorf("a delete was answered %s, not busy (BUSY_REASON_MACHINE)", describe(f))
	}

	return err
}

func checkAccepts(ctx context.Context, s *suite) error {
	p, err := s.begin(ctx, remove)
	if err != nil {
		return err
	}
	p.release()
	if _, err = p.result(ctx, s.late()); err != nil {
		return err
	}
	s.acknowledge(p.id)

	return s.witnessed("ACCEPT-1")
}

func checkAcceptsSlowRead(ctx context.Context, s *suite) error {
	release := s.fetches.hold()
	defer release()
	x, err := s.send(request{
		subject: s.subject("list", s.cfg.Class.Name), env: s.envelope("read-"+nuid.Next(), s.listBody()),
	})
	if err != nil {
		return err
	}
	f, err := x.first(ctx, s.cfg.Patience)
	switch {
	case err != nil:
		return fmt.Errorf("while the class is awaited: %w", err)
	case f.GetResult().GetStatus().GetCode() == driverv1.Code_CODE_OK && f.GetResult() != nil:
		return skipf("the driver answers without the class, by which the suite could hold it up")
	case f.GetAccepted() == nil:
		return fmt.Errorf("a read that takes its time was answered %s", describe(f))
	}
	release()
	_, err = x.result(ctx, s.late())

	return err
}

// slotsFilled is how many slots the suite is ready to fill.
const slotsFilled = 128

func checkSlots(ctx context.Context, s *suite) error {
	slots := int(s.session().GetSlots())
	if slots == 0 || slots > slotsFilled {
		return skipf("the replica has %d slots, and the suite fills 1 to %d", slots, slotsFilled)
	}
	p, err := s.begin(ctx, remove)
	if err != nil {
		return err
	}
	defer p.release()
	taken := []*exchange{p.exchange}
	refused := false
	for range slots { // one more than there is room for
		m := s.newMachine()
		r, err := s.mutation(ctx, m, m.operation(remove), s.deleteBody(m))
		if err != nil {
			return err
		}
		x, err := s.send(r)
		if err != nil {
			return err
		}
		f, err := x.first(ctx, s.cfg.Patience)
		if err != nil {
			return fmt.Errorf("with %d of %d slots taken: %w", len(taken), slots, err)
		}
		if f.GetBusy() != nil {
			refused = true

			break
		}
		taken = append(taken, x)
	}
	p.release()
	for _, x := range taken {
		if _, err := x.result(ctx, s.late()); err != nil {
			return err
		}
		s.acknowledge(x.id)
	}
	if !refused {
		return fmt.Errorf("%d operations were accepted by a replica of %d slots", len(taken), slots)
	}

	return nil
}

func checkCancel(ctx context.Context, s *suite) error {
	p, err := s.begin(ctx, create)
	if err != nil {
		return err
	}
	defer p.release()
	s.control("cancel", &driverv1.Envelope{
		OperationId: p.id, Epoch: s.epoch, Body: &driverv1.Envelope_Cancel{Cancel: &driverv1.Cancel{OperationId: p.id}},
	})
	// A driver may leave its wait for the class alone.
	timer := time.AfterFunc(silence, p.release)
	defer timer.Stop()
	result, err := p.result(ctx, s.late())
	if err != nil {
		return fmt.Errorf("after a cancel: %w", err)
	}
	s.acknowledge(p.id)
	if result.GetStatus().GetCode() == driverv1.Code_CODE_OK || result.GetOutcomeUnknown() {
		return nil
	}

	return s.none(ctx, p.m, "the create was cancelled with nothing begun")
}

// atCloud sends a create and returns when the cloud is at it. On a machine that stalls
// the time may be over before: then there is more of it for the next one.
func (s *suite) atCloud(ctx context.Context, timeout time.Duration) (p *pending, err error) {
	if cloud := s.cfg.Cloud; cloud.Hold == nil || cloud.Held == nil {
		return nil, skipf("needs a cloud that holds a create up (Config.Cloud.Hold)")
	}
	for range windows {
		if p, err = s.atCloudWithin(ctx, timeout); !errors.Is(err, errNotReached) {
			break
		}
		timeout *= 2
	}

	return p, err
}

func (s *suite) atCloudWithin(ctx context.Context, timeout time.Duration) (p *pending, err error) {
	cloud := s.cfg.Cloud
	p = &pending{m: s.newMachine(), timeout: timeout}
	if p.release, err = cloud.Hold(ctx, p.m.GetName()); err != nil {
		return nil, err
	}
	r, err := s.mutation(ctx, p.m, p.m.operation(create), s.createBody(p.m))
	if err == nil {
		r.env.Timeout = durationpb.New(timeout)
		p.exchange, err = s.send(r)
	}
	if err == nil && !s.plain { // which would answer with its result only
		err = p.acceptedFrame(ctx)
	}
	if err == nil {
		limit, cancel := context.WithTimeoutCause(ctx, timeout+silence, errNotReached)
		if err = cloud.Held(limit, p.m.GetName()); err != nil && limit.Err() != nil {
			err = context.Cause(limit)
		}
		cancel()
	}
	if err != nil {
		p.release()
	}

	return p, err
}

// checkUnlooked has a create with recover fail before it can look for what an
// earlier attempt has made.
func checkUnlooked(ctx context.Context, s *suite) error {
	m := s.newMachine()
	undo := s.fetches.alter(func(f *fetches) { f.away = true })
	defer undo()
	fetched := s.fetches.count(whatClass)
	result, err := s.attempt(ctx, m, m.operation(create), s.createBody(m), recovering)
	switch {
	case err != nil:
		return fmt.Errorf("create with recover, and no class to be had: %w", err)
	case s.fetches.count(whatClass) == fetched, result.GetStatus().GetCode() == driverv1.Code_CODE_OK:
		return nil // it needs no class
	case !result.GetOutcomeUnknown():
		return fmt.Errorf("a create with recover got no class, could not look for what an earlier attempt has made, "+
			"and says %s, not that the outcome is unknown", said(result))
	default:
		return nil
	}
}

// doubted has creates fail that are asked for while the call of an earlier attempt may
// still run, and hands on what comes of each: one that finds no class, and one whose
// name is taken where the cloud minds.
func (s *suite) doubted(ctx context.Context, judge func(*driverv1.Result) error) error {
	try := func(m *machine) error {
		result, err := s.attempt(ctx, m, m.operation(create), s.createBody(m), doubting)
		if err != nil || result.GetStatus().GetCode() == driverv1.Code_CODE_OK {
			return err
		}

		return judge(result)
	}
	undo := s.fetches.alter(func(f *fetches) { f.away = true })
	err := try(s.newMachine())
	undo()
	if err != nil {
		return fmt.Errorf("create while an earlier attempt may run, and no class to be had: %w", err)
	}
	m, _, _, err := s.first(ctx)
	if err != nil {
		return err
	}
	if err := try(s.namesake(m)); err != nil {
		return fmt.Errorf("create of a name that is taken, while an earlier attempt may run: %w", err)
	}

	return nil
}

// doubting makes a request one for another attempt, while the call of an earlier one
// may still run.
func doubting(env *driverv1.Envelope) { env.Recover, env.EarlierMayRun, env.Attempt = true, true, 2 }

func checkDoubted(ctx context.Context, s *suite) error {
	if err := s.doubted(ctx, mustDoubt); err != nil {
		return err
	}
	if err := s.doubtedLater(ctx); err != nil {
		return fmt.Errorf("create that ran already when it was asked for while an earlier attempt may run: %w", err)
	}

	return nil
}

// mustDoubt finds fault with a failure that is told as if it were known.
func mustDoubt(result *driverv1.Result) error {
	if !result.GetOutcomeUnknown() {
		return fmt.Errorf("it was answered %s, not that the outcome is unknown", said(result))
	}

	return nil
}

// doubtedLater has a create fail, for its name is taken, that is asked for again while
// it runs, and only then with the word that the call of an earlier attempt may run.
func (s *suite) doubtedLater(ctx context.Context) error {
	m, _, _, err := s.first(ctx)
	if err != nil {
		return err
	}
	p, err := s.beginFor(ctx, s.namesake(m), create, func(*driverv1.Envelope) {})
	if err != nil {
		return err
	}
	defer p.release()
	x, err := s.askAgain(ctx, p, func(env *driverv1.Envelope) {
		doubting(env)
		env.Attempt = p.attempt + 1
	})
	if err != nil {
		return err
	}
	p.release()
	result, err := x.result(ctx, s.late())
	s.acknowledge(p.id)
	if err != nil || result.GetStatus().GetCode() == driverv1.Code_CODE_OK { // the cloud does not mind
		return err
	}

	return mustDoubt(result)
}

func checkNoEffect(ctx context.Context, s *suite) error {
	judge := func(result *driverv1.Result) error {
		if result.GetOutcomeUnknown() && !result.GetNoEffect() {
			return fmt.Errorf("it was answered %s, without no_effect", said(result))
		}

		return nil
	}
	if err := s.doubted(ctx, judge); err != nil {
		return err
	}

	return s.keptFromBeginning(ctx, judge)
}

// keptFromBeginning hands on what comes of a create that its replica may not begin any
// more, as another attempt has its claim's place.
func (s *suite) keptFromBeginning(ctx context.Context, judge func(*driverv1.Result) error) error {
	if s.plain { // which claims nothing
		return nil
	}
	p, err := s.begin(ctx, create)
	if err != nil {
		return err
	}
	defer p.release()
	if _, err := s.usurp(ctx, p.m); err != nil {
		return err
	}
	result, err := s.finish(ctx, p)
	if err != nil || result.GetStatus().GetCode() == driverv1.Code_CODE_OK { // which breaks FENCE-1
		return err
	}
	if err := judge(result); err != nil {
		return fmt.Errorf("create whose claim another attempt replaced before it began: %w", err)
	}

	return nil
}

func checkOutcomeUnknown(ctx context.Context, s *suite) error {
	if err := checkUnlooked(ctx, s); err != nil {
		return err
	}
	if err := s.keptFromBeginning(ctx, mustDoubt); err != nil {
		return err
	}
	p, err := s.atCloud(ctx, time.Second)
	if err != nil {
		return err
	}
	defer p.release()
	result, err := p.result(ctx, p.timeout+s.cfg.Patience)
	if err != nil {
		return fmt.Errorf("after its deadline: %w", err)
	}
	if !result.GetOutcomeUnknown() {
		s.acknowledge(p.id)

		return fmt.Errorf("the deadline passed while the cloud was at it, and the result says %s, not that the outcome is unknown", said(result))
	}

	return nil
}
