package drivertest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// windows is how often what has to do with time is tried: a machine that stalls
// makes the best driver late, and no bad one punctual.
const windows = 5

// checkHello compares how soon a session follows on the word of a new mcm with how
// soon it would come anyway.
func checkHello(ctx context.Context, s *suite) error {
	announcer, err := bus.NewAnnouncer(s.conn, s.cfg.Cluster)
	if err != nil {
		return err
	}
	const sure, most = 3, 15 // a late session makes the next one seem early, and a stalled machine makes any late
	balance := 0
	for n := 0; n < most && balance > -sure; n++ {
		last := s.session().GetSequence()
		if err := s.newerThan(ctx, last); err != nil {
			return err
		}
		last = s.session().GetSequence()
		said := time.Now()
		if err := announcer.Hello(s.hello()); err != nil {
			return err
		}
		if err := s.newerThan(ctx, last); err != nil {
			return err
		}
		if s.session().at.Sub(said) < bus.SessionInterval/2 {
			balance++
		} else {
			balance--
		}
		if balance == sure {
			return nil
		}
	}

	return errors.New("the word of a new mcm is not followed by a session at once")
}

// newerThan waits for a session after the one with this sequence.
func (s *suite) newerThan(ctx context.Context, sequence uint64) error {
	return s.eventually(ctx, "the replica sends a session",
		func() (bool, error) { return s.session().GetSequence() > sequence, nil })
}

// checkResults lets deadlines pass, and looks whether everything that was accepted got
// its result.
func checkResults(ctx context.Context, s *suite) error {
	m := s.newMachine()
	for _, late := range []struct {
		what string
		ask  func() (request, error)
	}{
		{"list", func() (request, error) {
			return request{subject: s.subject("list", s.cfg.Class.Name), env: s.envelope("read-"+nuid.Next(), s.listBody())}, nil
		}},
		{"delete", func() (request, error) { return s.mutation(ctx, m, m.operation(remove), s.deleteBody(m)) }},
	} {
		if err := s.endsInTime(ctx, late.ask); err != nil {
			return fmt.Errorf("%s, whose class cannot be had, after its deadline: %w", late.what, err)
		}
	}
	var left []string
	if err := s.eventually(ctx, "all results are here", func() (bool, error) {
		left = s.unfinished()

		return len(left) == 0, nil
	}); err != nil {
		return fmt.Errorf("accepted, and never ended: %s", left[0])
	}

	return s.witnessed("RESULT-1")
}

const (
	// lateness is how long after its deadline the manager waits for a result.
	lateness = 5 * time.Second
	// stalls is how often a machine that stalls may make a result late.
	stalls = 2
)

// endsInTime holds the class back for longer than a request may take.
func (s *suite) endsInTime(ctx context.Context, ask func() (request, error)) error {
	var err error
	for range stalls {
		release := s.fetches.hold()
		var r request
		if r, err = ask(); err == nil {
			err = s.endOnce(ctx, r)
		}
		release()
		if err == nil {
			break
		}
	}

	return err
}

func (s *suite) endOnce(ctx context.Context, r request) error {
	r.env.Timeout = durationpb.New(silence)
	x, err := s.send(r)
	if err != nil {
		return err
	}
	if _, err := x.result(ctx, silence+min(lateness, s.cfg.Patience)); err != nil {
		return err
	}
	if x.mutates {
		s.acknowledge(x.id)
	}

	return nil
}

func checkWitnessed(clause string) func(context.Context, *suite) error {
	return func(_ context.Context, s *suite) error { return s.witnessed(clause) }
}

// mostBetween is the time between two sessions, and what a scheduler may add.
const mostBetween = bus.SessionInterval + bus.SessionInterval/4

func checkSessions(ctx context.Context, s *suite) error {
	if err := s.witnessed("SESSION-1"); err != nil {
		return err
	}
	if err := s.punctual(ctx); err != nil {
		return err
	}
	if s.cfg.Process == nil {
		return skipf("they come in time; whether they do while it drains takes a driver that may be stopped and started %s", byProcess)
	}

	return s.drained(ctx)
}

// punctual listens for sessions in a row without a gap.
func (s *suite) punctual(ctx context.Context) error {
	const inARow = 4
	var late time.Duration
	for range windows {
		from := s.session().GetSequence()
		if err := s.eventually(ctx, "the replica sends sessions",
			func() (bool, error) { return s.session().GetSequence() >= from+inARow, nil }); err != nil {
			return err
		}
		late = 0
		all := s.sessionsOf(s.target)
		for n := len(all) - 1; n > 0 && all[n].GetSequence() > from; n-- {
			late = max(late, all[n].at.Sub(all[n-1].at))
		}
		if late <= mostBetween {
			return nil
		}
	}

	return fmt.Errorf("%s passed between two sessions, more than %s", late.Round(time.Millisecond), bus.SessionInterval)
}

// drained stops the replica in the middle of an operation, and starts it again.
func (s *suite) drained(ctx context.Context) error {
	p, err := s.begin(ctx, remove)
	if _, skipped := errors.AsType[skip](err); err != nil && !skipped {
		return err
	}
	if err := s.cfg.Process.Stop(ctx); err != nil {
		return err
	}
	replica := s.target
	var faults []error
	if p != nil {
		faults = append(faults, s.whileDraining(ctx, p))
	}
	faults = append(faults, s.eventually(ctx, "the replica, told to stop, says that it has stopped",
		func() (bool, error) { return s.session().GetStopped(), nil }))
	if err := s.cfg.Process.Wait(ctx); err != nil {
		faults = append(faults, err)
	}
	if err := s.cfg.Process.Start(ctx); err != nil {
		return errors.Join(append(faults, err)...)
	}

	return errors.Join(append(faults, s.newTarget(ctx, replica))...)
}

// whileDraining holds a replica that was told to stop against what it must do.
func (s *suite) whileDraining(ctx context.Context, p *pending) error {
	defer p.release()
	if err := s.eventually(ctx, "the replica, told to stop, says that it drains",
		func() (bool, error) { return s.session().GetDraining(), nil }); err != nil {
		return err
	}
	m := s.newMachine()
	r, err := s.mutation(ctx, m, m.operation(remove), s.deleteBody(m))
	if err != nil {
		return err
	}
	x, err := s.send(r)
	if err != nil {
		return err
	}
	if f, err := x.first(ctx, s.cfg.Patience); err != nil || f.GetBusy() == nil {
		return errors.Join(err, errors.New("a replica that drains did not answer a new operation with busy"))
	}
	result, err := s.finish(ctx, p)
	if err == nil && result.GetStatus().GetCode() != driverv1.Code_CODE_OK {
		err = fmt.Errorf("the operation that ran when the replica was told to stop was answered %s", said(result))
	}

	return err
}

// newTarget waits for a replica after the one that was stopped, and looks at that
// from then on.
func (s *suite) newTarget(ctx context.Context, old string) error {
	last := func() session {
		all := s.sessionsOf(old)

		return all[len(all)-1]
	}
	stopped := last()
	deadline, cancel := context.WithTimeout(ctx, s.cfg.Wait)
	defer cancel()
	if err := s.eventually(deadline, "the driver, started again, sends sessions", func() (bool, error) {
		// The last words of the one that was stopped may still come.
		now := last()
		if now.GetSequence() < stopped.GetSequence() || !now.GetStartedAt().AsTime().Equal(stopped.GetStartedAt().AsTime()) {
			s.blamef("SESSION-2", "started again, the driver calls itself replica %q as before", old)

			return true, nil
		}

		return s.chooseTarget() && s.target != old, nil
	}); err != nil {
		return err
	}

	return s.awaitStream(deadline)
}

// restart has the driver end, and start again.
func (s *suite) restart(ctx context.Context) error {
	old := s.target
	if err := s.cfg.Process.Stop(ctx); err != nil {
		return err
	}
	if err := s.cfg.Process.Wait(ctx); err != nil {
		return err
	}
	if err := s.cfg.Process.Start(ctx); err != nil {
		return err
	}

	return s.newTarget(ctx, old)
}

func checkReplicaIDs(ctx context.Context, s *suite) error {
	if s.cfg.Process != nil {
		if err := s.restart(ctx); err != nil {
			return err
		}
	}
	s.mu.Lock()
	replicas := make(map[string][]session, len(s.sessions))
	for replica, all := range s.sessions {
		replicas[replica] = append([]session(nil), all...)
	}
	s.mu.Unlock()
	for replica, all := range replicas {
		for n := 1; n < len(all); n++ {
			if !all[n].GetStartedAt().AsTime().Equal(all[0].GetStartedAt().AsTime()) {
				return fmt.Errorf("two processes call themselves replica %q: their sessions say different started_at", replica)
			}
			if all[n].GetSequence() <= all[n-1].GetSequence() {
				return fmt.Errorf("sessions of replica %q are not counted: %d follows %d", replica, all[n].GetSequence(), all[n-1].GetSequence())
			}
		}
	}

	if err := s.witnessed("SESSION-2"); err != nil || s.cfg.Process != nil {
		return err
	}

	return skipf("they are unique; whether they are new takes a driver that may be stopped and started %s", byProcess)
}
