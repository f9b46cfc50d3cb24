package drivertest

import (
	"slices"
	"strings"
	"testing"

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
	var summary, junit strings.Builder
	if err := report.WriteSummary(&summary); err != nil {
		t.Fatal(err)
	}
	if err := report.WriteJUnit(&junit); err != nil {
		t.Fatal(err)
	}
	for text, wants := range map[string][]string{
		summary.String(): {
			"2 clauses passed, 0 failed, 1 excepted", "need no exception: LIST-2", "excepted: the cloud has no tags", "the cost: names must differ",
		},
		junit.String(): {`failures="0" skipped="1"`, "excepted: the cloud has no tags"},
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
