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

// cleanUpLimit bounds what is done once checking has ended, for whatever reason.
const cleanUpLimit = 2 * time.Minute

// Run checks a driver, one subtest for each clause. The driver must be on the bus,
// or come to it within cfg.Wait. The report is for those who want to know more, such as
// what was skipped.
func Run(t *testing.T, cfg Config) *Report { //nolint:thelper // it is the test, not a helper of one
	started := time.Now()
	s, err := open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer s.bench.Close()
	report := &Report{Provider: s.bench.Provider, Replica: s.bench.Target, Plain: s.bench.Plain}
	for _, c := range clauses() {
		if !wants(s.bench.Config, c.ID) {
			continue
		}
		t.Run(c.ID, func(t *testing.T) {
			f := s.look(t.Context(), c)
			report.Findings = append(report.Findings, f)
			switch f.Verdict {
			case Failed:
				t.Errorf("%s: %s", c.Says, f.Detail)
			case Skipped, Manager:
				t.Skipf("%s: %s", c.Says, f.Detail)
			case Passed:
			}
		})
	}
	if err := s.finally(t.Context()); err != nil {
		report.Left = err.Error()
		t.Error(err)
	}
	report.Took = time.Since(started)

	return report
}

// Check checks a driver as [Run] does, without package testing. Tell is called
// with each finding as it comes; it may be nil. The error says why the driver could
// not be checked at all; what is wrong with it is in the report.
func Check(ctx context.Context, cfg Config, tell func(Finding)) (*Report, error) {
	if _, err := complete(cfg); err != nil { // whatever may be wrong with the driver
		return nil, err
	}
	started := time.Now()
	s, err := open(ctx, cfg)
	if ctx.Err() != nil && err != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return nil, err
	}
	defer s.bench.Close()
	report := &Report{Provider: s.bench.Provider, Replica: s.bench.Target, Plain: s.bench.Plain}
	for _, c := range clauses() {
		if !wants(s.bench.Config, c.ID) || ctx.Err() != nil {
			continue
		}
		f := s.look(ctx, c)
		report.Findings = append(report.Findings, f)
		if tell != nil {
			tell(f)
		}
	}
	if err := s.finally(ctx); err != nil {
		report.Left = err.Error()
	}
	report.Took = time.Since(started)
	if ctx.Err() != nil {
		return report, context.Cause(ctx)
	}

	return report, nil
}

func wants(cfg Config, id string) bool { return len(cfg.Only) == 0 || slices.Contains(cfg.Only, id) }

// look checks one clause and removes what was made for it.
func (s *suite) look(ctx context.Context, c Clause) Finding {
	f := Finding{Clause: c, Verdict: Passed}
	started := time.Now()
	err := s.run(ctx, func(k *check) { k.applies(c) })
	if err == nil {
		limit, cancel := context.WithTimeoutCause(ctx, 2*s.bench.Timeout+cleanUpLimit, errors.New("the check took too long"))
		err = s.run(limit, c.check)
		cancel()
		if cleaned := s.run(ctx, (*check).cleanUp); cleaned != nil && err == nil {
			err = cleaned
		}
	}
	var why bench.SkipError
	switch {
	case c.Manager:
		f.Verdict = Manager
	case err != nil && ctx.Err() != nil: // it is the checking that has ended
		f.Verdict, err = Skipped, context.Cause(ctx)
	case errors.As(err, &why) && s.bench.Strict && !why.Unbound && !slices.Contains(s.bench.MaySkip, c.ID):
		f.Verdict = Failed
		err = fmt.Errorf("skipped, which it may not be: %w", err)
	case errors.As(err, &why):
		f.Verdict, f.Unbound = Skipped, why.Unbound
	case err != nil:
		f.Verdict = Failed
	}
	if err != nil {
		f.Detail = err.Error()
	}
	f.Took = time.Since(started)

	return f
}

// finally removes what is left, also when checking was interrupted.
func (s *suite) finally(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), cleanUpLimit, errors.New("cleaning up took too long"))
	defer cancel()

	return errors.Join(s.run(ctx, (*check).cleanUp), s.run(ctx, func(c *check) { c.NothingLeft() }))
}
