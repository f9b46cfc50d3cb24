package drivertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// aWhile is how long the suite has results kept. A day it cannot wait.
const aWhile = 2 * time.Second

// A done is a mutation whose result was not acknowledged.
type done struct {
	m      *machine
	id     string
	body   func(*machine) *driverv1.Envelope
	result *driverv1.Result
}

// once has a mutation done without acknowledging it. On a machine that stalls the
// operations stream may not answer in time: another one is asked for then.
func (s *suite) once(ctx context.Context, op driverv1.Operation) (*done, error) {
	d := &done{body: s.deleteBody}
	if op == create {
		d.body = s.createBody
	}
	for range firstTries {
		d.m = s.newMachine()
		d.id = d.m.operation(op)
		var err error
		if d.result, err = s.try(ctx, d.m, d.id, d.body(d.m), func(*driverv1.Envelope) {}); err != nil {
			return d, err
		}
		if !d.result.GetOutcomeUnknown() {
			break
		}
	}

	return d, s.eventually(ctx, "operation "+d.id+" is claimed", func() (bool, error) { return s.claimedTimes(d.id) > 0, nil })
}

// onceInVain is once without a class to be had.
func (s *suite) onceInVain(ctx context.Context, op driverv1.Operation) (*done, error) {
	undo := s.fetches.alter(func(f *fetches) { f.away = true })
	defer undo()

	return s.once(ctx, op)
}

func (s *suite) claimedTimes(id string) int { return len(s.claimsOf(id, driverv1.Claim_STATE_RUNNING)) }

// checkKept asks for results again that were not acknowledged.
func checkKept(ctx context.Context, s *suite) error {
	created, err := s.once(ctx, create)
	if err != nil {
		return err
	}
	instance, err := createdOf(created.result)
	if err != nil {
		return err
	}
	failed, err := s.onceInVain(ctx, create)
	if err != nil {
		return err
	}
	removed, err := s.once(ctx, remove)
	if err != nil {
		return err
	}
	all := []*done{created, failed, removed}
	if err := pause(ctx, aWhile); err != nil { // for what must not be forgotten
		return err
	}
	for _, d := range all {
		if err := errors.Join(s.told(ctx, d), s.repeated(ctx, d)); err != nil {
			return fmt.Errorf("a result that was not acknowledged: %w", err)
		}
	}
	for _, d := range all {
		s.acknowledge(d.id)
	}

	return s.one(ctx, created.m, instance.GetProviderId())
}

// told looks for a settled operation where the manager looks for it.
func (s *suite) told(ctx context.Context, d *done) error {
	held, err := s.ops(ctx, d.id, 0)
	switch {
	case err != nil:
		return err
	case len(held.GetOperations()) == 0:
		return errors.New("ops does not tell of its operation")
	case held.GetResult() == nil:
		return errors.New("ops for the one operation comes without it")
	case !proto.Equal(held.GetResult(), d.result):
		return fmt.Errorf("ops says %s, after %s", said(held.GetResult()), said(d.result))
	}
	if s.eventually(ctx, "", func() (bool, error) {
		now := s.session()

		return now.GetOmitted() > 0 || slices.ContainsFunc(now.GetOperations(), func(o *driverv1.OperationState) bool {
			return o.GetOperationId() == d.id && o.GetSettled()
		}), nil
	}) != nil {
		return errors.New("sessions do not tell of its operation as settled")
	}

	return nil
}

// repeated asks for an operation again that has a result: it must be the same, and the
// operation must not be run for it.
func (s *suite) repeated(ctx context.Context, d *done) error {
	s.fetches.touch() // whoever runs it needs the class anew
	fetched, claimed := s.fetches.count(whatClass), s.claimedTimes(d.id)
	again, err := s.try(ctx, d.m, d.id, d.body(d.m), func(*driverv1.Envelope) {})
	switch {
	case err != nil:
		return fmt.Errorf("asked for again: %w", err)
	case s.fetches.count(whatClass) != fetched, s.claimedTimes(d.id) != claimed:
		return errors.New("asked for again, its operation was run again")
	case !proto.Equal(again, d.result):
		return fmt.Errorf("asked for again, it was %s, after %s", said(again), said(d.result))
	default:
		return nil
	}
}

func checkUnknownNotKept(ctx context.Context, s *suite) error {
	m := s.newMachine()
	id := m.operation(create)
	undo := s.fetches.alter(func(f *fetches) { f.away = true })
	result, err := s.try(ctx, m, id, s.createBody(m), recovering)
	undo()
	if err != nil {
		return err
	}
	if !result.GetOutcomeUnknown() { // which breaks RESULT-3, or it needs no class
		return skipf("no operation ended with an unknown outcome: a create with recover that got no class was answered %s", said(result))
	}
	held, err := s.ops(ctx, id, 0)
	if err != nil {
		return err
	}
	if len(held.GetOperations()) > 0 {
		return errors.New("ops still tells of an operation that ended with an unknown outcome")
	}
	if err := s.endStored(ctx, m, id, result); err != nil { // that would be keeping it as well
		return err
	}

	return s.witnessed("CLAIM-5")
}

// denialKept is how long a replica has to remember what it said that it does not hold.
const denialKept = 4 * time.Second

// checkDenial asks for attempts that the replica has said it does not hold, at once and
// towards the end of the time for which that counts.
func checkDenial(ctx context.Context, s *suite) error {
	for range windows {
		m := s.newMachine()
		id := m.operation(remove)
		asked := time.Now()
		held, err := s.ops(ctx, id, 2)
		if err != nil {
			return err
		}
		if len(held.GetOperations()) > 0 {
			return errors.New("ops tells of an operation that nobody asked for")
		}
		unclear, err := s.takes(ctx, m, id, 2, asked)
		if err == nil {
			err = pause(ctx, time.Until(asked.Add(denialKept*3/4)))
		}
		if err == nil && !unclear {
			unclear, err = s.takes(ctx, m, id, 1, asked) // an earlier attempt is denied along with it
		}
		if err == nil && !unclear {
			return s.deniesFenced(ctx)
		}
		if err != nil || !unclear {
			return err
		}
	}

	return skipf("%s pass here between a question and a request: nothing is denied then", denialKept)
}

// takes asks for an attempt that was denied. Unclear is true when the denial did not count
// any more by the time of the answer.
func (s *suite) takes(ctx context.Context, m *machine, id string, attempt uint32, denied time.Time) (unclear bool, err error) {
	r, err := s.mutation(ctx, m, id, s.deleteBody(m))
	if err != nil {
		return false, err
	}
	r.env.Attempt = attempt
	x, err := s.send(r)
	if err != nil {
		return false, err
	}
	f, err := x.first(ctx, s.cfg.Patience)
	switch {
	case errors.Is(err, errNoFrame):
		return false, nil
	case err != nil, f.GetBusy() != nil:
		return false, err
	case time.Since(denied) > denialKept:
		return true, nil
	default:
		return false, fmt.Errorf("it said that it does not hold the attempt, and %s later it answered attempt %d %s",
			time.Since(denied).Round(time.Millisecond), attempt, describe(f))
	}
}
