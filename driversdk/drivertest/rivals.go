package drivertest

import (
	"context"
	"fmt"
	"slices"
	"time"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// overtaken asks again for a create that is at the cloud, and has another replica's
// attempt take its claim's place before it ends: as the stream refuses its outcome,
// nobody may hear of that.
func (s *suite) overtaken(ctx context.Context) error {
	p, err := s.atCloud(ctx, s.cfg.Timeout)
	if err != nil {
		return err
	}
	defer p.release()
	x, err := s.askAgain(ctx, p, recovering)
	if err != nil {
		return err
	}
	s.mu.Lock()
	x.moved = true // it needs no result
	s.mu.Unlock()
	if _, err := s.usurp(ctx, p.m); err != nil {
		return err
	}
	p.release()

	return s.eventually(ctx, "the replica forgets an operation whose claim another attempt has replaced", func() (bool, error) {
		held, err := s.ops(ctx, p.id, 0)
		if err == nil {
			err = uncounted(held.GetResult())
		}
		for err == nil && len(x.frames) > 0 {
			var f frame
			if f, err = x.next(ctx, s.cfg.Patience); err == nil {
				err = uncounted(f.GetResult())
			}
		}

		return err == nil && len(held.GetOperations()) == 0, err
	})
}

// uncounted finds fault with a result that another attempt's may contradict. One that
// leaves open what came of it may be told at any time.
func uncounted(result *driverv1.Result) error {
	if result == nil || result.GetOutcomeUnknown() {
		return nil
	}

	return fmt.Errorf("it was answered %s, although another attempt has its claim's place", said(result))
}

// deniesFenced asks for an attempt that the replica does not hold, as it lists the
// operation as fenced, and whose claim another replica has since.
func (s *suite) deniesFenced(ctx context.Context) error {
	for range windows {
		p, err := s.begin(ctx, remove)
		if err != nil {
			return err
		}
		unclear, err := s.takesFenced(ctx, p)
		p.release()
		if err != nil || !unclear {
			return err
		}
	}

	return nil // it has denied what it does not list at all
}

func (s *suite) takesFenced(ctx context.Context, p *pending) (unclear bool, err error) {
	if _, err := s.usurp(ctx, p.m); err != nil {
		return false, err
	}
	undo := s.fetches.alter(func(f *fetches) { f.away = true })
	p.release()
	_, err = p.result(ctx, s.late()) // known: nothing was begun
	undo()
	if err != nil {
		return false, err
	}
	later := p.attempt + 1
	var held *driverv1.OpsResponse
	var asked time.Time
	if s.eventually(ctx, "", func() (bool, error) {
		asked = time.Now()
		held, err = s.ops(ctx, p.id, later)

		return !slices.ContainsFunc(held.GetOperations(), func(o *driverv1.OperationState) bool { return !o.GetFenced() }), err
	}) != nil {
		return false, err // it is as good as held, and nobody goes on from it
	}

	return s.takes(ctx, p.m, p.id, later, asked)
}
