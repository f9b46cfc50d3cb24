package drivertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
)

// Run checks a driver, one subtest for each clause. The driver must be on the bus,
// or come to it within cfg.Wait. The report is for those who want to know more, such as
// what was skipped.
func Run(t *testing.T, cfg Config) *Report { //nolint:thelper // it is the test, not a helper of one
	report, err := checkAll(t.Context(), cfg, func(c Clause, look func(context.Context) Finding) {
		t.Run(c.ID, func(t *testing.T) {
			switch f := look(t.Context()); f.Verdict {
			case Failed:
				t.Errorf("%s: %s", c.Says, f.Detail)
			case Excepted:
				t.Skipf("%s: %s\nexcepted: %s\nthe cost: %s", c.Says, f.Detail, f.Exception.Why, f.Exception.Cost)
			case Skipped, Manager:
				t.Skipf("%s: %s", c.Says, f.Detail)
			case Passed:
			}
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	if report.Left != "" {
		t.Error(report.Left)
	}
	for _, note := range report.Notes {
		t.Log(note)
	}
	if idle := report.Unneeded(); len(idle) > 0 {
		t.Logf("clauses that passed, and need no exception: %s", joinIDs(idle))
	}

	return report
}

// Check checks a driver as [Run] does, without package testing. Tell is called
// with each finding as it comes; it may be nil. The error says why the driver could
// not be checked at all, or not to the end; what is wrong with it is in the report.
func Check(ctx context.Context, cfg Config, tell func(Finding)) (*Report, error) {
	return checkAll(ctx, cfg, func(_ Clause, look func(context.Context) Finding) {
		if f := look(ctx); tell != nil {
			tell(f)
		}
	})
}

// checkAll calls each with every clause that is wanted, until ctx ends, and cleans up.
func checkAll(ctx context.Context, cfg Config, each func(c Clause, look func(context.Context) Finding)) (*Report, error) {
	started := time.Now()
	s, err := open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer s.bench.Close()
	report := &Report{Provider: s.bench.Provider, Replica: s.bench.Target, Plain: s.bench.Plain}
	for _, c := range clauses() {
		if len(cfg.Only) > 0 && !slices.Contains(cfg.Only, c.ID) || ctx.Err() != nil {
			continue
		}
		each(c, func(ctx context.Context) Finding {
			f := s.look(ctx, c)
			report.Findings = append(report.Findings, f)

			return f
		})
	}
	s.finally(ctx, report)
	report.Took = time.Since(started)

	return report, context.Cause(ctx)
}

// look checks one clause and removes what was made for it.
func (s *suite) look(ctx context.Context, c Clause) Finding {
	started := time.Now()
	var beyond error
	err := s.run(ctx, func(k *check) { k.applies(c) })
	if err == nil {
		err, beyond = s.examine(ctx, c)
	}
	f := s.judge(c, err, beyond)
	if f.Verdict != Passed && ctx.Err() != nil { // it is the checking that has ended
		f.Verdict, f.Detail = Skipped, context.Cause(ctx).Error()
	}
	f.Took = time.Since(started)

	return f
}

// examine makes the check of a clause and cleans up. It returns what the check has found, and what went wrong beyond that: no
// exception of the clause excuses a check that does not end, a driver that answers no more, or an instance that stays.
func (s *suite) examine(ctx context.Context, c Clause) (found, beyond error) {
	limit, cancel := context.WithTimeoutCause(ctx, 2*s.bench.Timeout+cleanUpLimit, errors.New("the check took too long"))
	defer cancel()
	found = s.run(limit, c.check)
	if limit.Err() != nil {
		found, beyond = nil, found
	}
	cleaned := s.run(ctx, (*check).cleanUp)
	_, skipped := errors.AsType[bench.SkipError](found)
	switch {
	case found == nil:
		return nil, errors.Join(beyond, cleaned)
	case skipped || exceptionOf(s.bench.Except, c.ID) == nil: // what could not be cleaned up is tried again at the end
		return found, beyond
	default:
		return found, s.run(ctx, func(k *check) { k.wantAlive(cleaned) })
	}
}

// judge returns the finding of a clause whose check has found an error, with what went wrong beyond it; nil for none.
func (s *suite) judge(c Clause, err, beyond error) Finding {
	f := Finding{Clause: c, Exception: exceptionOf(s.bench.Except, c.ID)}
	why, skipped := errors.AsType[bench.SkipError](err)
	switch {
	case c.Manager:
		f.Verdict = Manager
	case beyond != nil:
		f.Verdict = Failed
		err = errors.Join(err, beyond)
	case err == nil:
		f.Verdict = Passed
	case skipped && s.bench.Strict && !why.Unbound && !slices.Contains(s.bench.MaySkip, c.ID):
		f.Verdict = Failed
		err = fmt.Errorf("skipped, but strict forbids that: %w", err)
	case skipped:
		f.Verdict, f.Unbound = Skipped, why.Unbound
	default:
		f.Verdict = Failed
	}
	if f.Verdict == Failed && f.Exception != nil && beyond == nil {
		f.Verdict = Excepted
	}
	if err != nil {
		f.Detail = err.Error()
	}

	return f
}
