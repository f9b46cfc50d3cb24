package drivertest

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
)

// A clause with an exception fails no run; what does not need one is named.
func TestCheck_Except(t *testing.T) {
	t.Parallel()
	srv := bustest.Server(t, embedded.Options{})
	p := startProcess(t, srv.URL(), traits{fault: "CREATE-2"})
	cfg := lookInto(srv.URL(), p)
	cfg.Only = []string{"CREATE-2", "LIST-2", "DELETE-1"}
	cfg.Except = []Exception{
		{Clause: "CREATE-2", Why: "the cloud has no tags", Cost: "names must differ between clusters"},
		{Clause: "LIST-2", Why: "the cloud's list is a sample", Cost: "orphans stay"},
	}
	report, err := Check(t.Context(), cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	excepted, unneeded := idsOf(report.Of(Excepted)), idsOf(report.Unneeded())
	if !report.OK() || !slices.Equal(excepted, []string{"CREATE-2"}) || !slices.Equal(unneeded, []string{"LIST-2"}) {
		t.Errorf("OK %t, excepted %q, not needed %q, left %q; want CREATE-2 and LIST-2:\n%v", report.OK(), excepted, unneeded, report.Left, report.Findings)
	}
	summary, junit := written(t, report)
	for text, wants := range map[string][]string{
		summary: {
			"2 clauses passed, 0 failed, 1 excepted", "need no exception: LIST-2", "excepted: the cloud has no tags", "the cost: names must differ",
		},
		junit: {`failures="0" skipped="1"`, "excepted: the cloud has no tags"},
	} {
		for _, want := range wants {
			if !strings.Contains(text, want) {
				t.Errorf("want %q in the report:\n%s", want, text)
			}
		}
	}
}

// An exception permits one clause, not the others.
func TestCheck_ExceptAnother(t *testing.T) {
	t.Parallel()
	srv := bustest.Server(t, embedded.Options{})
	p := startProcess(t, srv.URL(), traits{fault: "CREATE-2"})
	cfg := lookInto(srv.URL(), p)
	cfg.Only = []string{"CREATE-2"}
	cfg.Except = []Exception{{Clause: "LIST-2", Why: "the cloud's list is a sample", Cost: "orphans stay"}}
	report, err := Check(t.Context(), cfg, nil)
	if err != nil || report.OK() {
		t.Errorf("a broken clause without an exception: %v, %v", err, report)
	}
}

// An exception permits what the check of its clause finds: no driver that is gone, and no clean-up that fails.
func TestCheck_ExceptNoMore(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		fault  fault
		clause string
		midway func(*process) // what happens in the middle of the check; nil for nothing
		want   Verdict
		says   string
	}{
		"breach":  {"the clause is broken, and nothing else", "CREATE-2", "CREATE-2", nil, Excepted, ""},
		"deletes": {"those of the clean-up fail, and the list shows nothing", "DELETE-1", "DELETE-1", nil, Excepted, ""},
		"cloud":   {"an instance may stay", "", "RESULT-3", func(p *process) { p.cloud.down.Store(true) }, Failed, "connection refused"},
		"gone":    {"a driver that ended keeps no clause", "", "RESULT-3", func(p *process) { p.replica.nc.Close() }, Failed, "answers no more"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := bustest.Server(t, embedded.Options{})
			p := startProcess(t, srv.URL(), traits{fault: tc.fault})
			cfg := lookInto(srv.URL(), p)
			cfg.Timeout, cfg.Patience = time.Second, time.Second
			cfg.Only = []string{tc.clause}
			cfg.Except = []Exception{{Clause: tc.clause, Why: "the cloud cannot", Cost: "care"}}
			if tc.midway != nil {
				cfg.Cloud.Hold = func(context.Context, string) (func(), error) {
					tc.midway(p)

					return nil, errors.New("nothing can be held up")
				}
			}
			report, err := Check(t.Context(), cfg, nil)
			if err != nil {
				t.Fatal(err)
			}
			if f := report.Findings[0]; f.Verdict != tc.want || !strings.Contains(f.Detail, tc.says) {
				t.Errorf("%s: want %s with %q, have %s", tc.reason, tc.want, tc.says, f)
			}
		})
	}
}

func TestValidExceptions(t *testing.T) {
	t.Parallel()
	good := Exception{Clause: "CREATE-2", Why: "no tags", Cost: "names must differ"}
	for name, tc := range map[string]struct {
		reason string
		list   []Exception
		says   string // empty: nothing is wrong
	}{
		"none":           {"most drivers keep all", nil, ""},
		"good":           {"it says all", []Exception{good}, ""},
		"twice":          {"one of them would not be read", []Exception{good, good}, "clause CREATE-2 has two"},
		"no clause":      {"it would permit nothing", []Exception{{Why: "a", Cost: "b"}}, "exception 1 names no clause"},
		"unknown clause": {"it may be a typing error", []Exception{good, {Clause: "NO-1", Why: "a", Cost: "b"}}, `"NO-1"`},
		"no reason":      {"the operator must know", []Exception{{Clause: "LIST-1", Cost: "b"}}, "LIST-1 must say why"},
		"no cost":        {"the operator must know", []Exception{{Clause: "LIST-1", Why: "a"}}, "LIST-1 must say why"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			errs := validExceptions(tc.list)
			if (tc.says == "") != (len(errs) == 0) || len(errs) > 0 && !strings.Contains(errs[0].Error(), tc.says) {
				t.Errorf("%s: want %q, have %v", tc.reason, tc.says, errs)
			}
		})
	}
}
