package drivertest

import (
	"context"
	"fmt"
	"slices"
	"time"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// overtaken has a create at the cloud when its replica is taken for dead, asks for it
// again, and has another replica's attempt take its claim's place before it ends: as
// the stream refuses its outcome, nobody may hear of that.
func (s *suite) overtaken(ctx context.Context) error {
	p, err := s.atCloud(ctx, s.cfg.Timeout)
	if err != nil {
		return err
	}
	defer p.release()
	if err := s.bury(ctx); err != nil {
		return err
	}
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
	if err := s.bury(ctx); err != nil {
		return false, err
	}
	later, asked := p.attempt+1, time.Now()
	held, err := s.ops(ctx, p.id, later)
	if err != nil {
		return false, err
	}
	if !slices.ContainsFunc(held.GetOperations(), (*driverv1.OperationState).GetFenced) {
		return false, nil // it is as good as held, and nobody goes on from it
	}
	if _, err := s.usurp(ctx, p.m); err != nil {
		return false, err
	}
	p.release()
	if _, err := p.result(ctx, s.late()); err != nil {
		return false, err
	}

	return s.takes(ctx, p.m, p.id, later, asked)
}
