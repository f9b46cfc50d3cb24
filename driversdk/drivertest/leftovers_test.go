package drivertest

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
)

// A create that was cut may have its instance appear after the clauses. It goes, too.
func TestCheck_LateInstance(t *testing.T) {
	t.Parallel()
	srv := bustest.Server(t, embedded.Options{})
	p := startProcess(t, srv.URL(), traits{cuts: true})
	cfg := testConfig(srv.URL())
	cfg.Only = []string{"CREATE-1"}
	report, err := Check(t.Context(), cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	if failed := idsOf(report.Of(Failed)); report.Left != "" || !slices.Equal(failed, cfg.Only) {
		t.Errorf("left %q, failed %q; want nothing left, and the clause failed as no create was answered", report.Left, failed)
	}
	p.cloud.mu.Lock()
	defer p.cloud.mu.Unlock()
	if p.cloud.made == 0 || len(p.cloud.instances) > 0 {
		t.Errorf("the cloud made %d instances, and %d are left; want one at least, and none left", p.cloud.made, len(p.cloud.instances))
	}
}

// An instance may come when nothing waits for it any more. The report says what to look for.
func TestCheck_Unclear(t *testing.T) {
	t.Parallel()
	srv := bustest.Server(t, embedded.Options{})
	startProcess(t, srv.URL(), traits{cuts: true})
	cfg := testConfig(srv.URL())
	cfg.Only, cfg.LateInstance = []string{"CREATE-1"}, time.Nanosecond
	report, err := Check(t.Context(), cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	summary, junit := written(t, report)
	for _, text := range []string{summary, junit} {
		if !strings.Contains(text, "creates of 1 machines have an unknown outcome") || !strings.Contains(text, "machines named conformance-") {
			t.Errorf("want what to look for in the cloud:\n%s", text)
		}
	}
}

// A delete that failed is no leftover if the list shows none afterwards. That counts only of a list that shows all.
func TestCheck_FailedDelete(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason   string
		findings []Finding
		left     bool
	}{
		"list":      {"the list shows what there is", nil, false},
		"no list":   {"it was seen to leave one out", []Finding{{Clause: Clause{ID: "LIST-2"}, Verdict: Failed}}, true},
		"a sample":  {"the same of a known one", []Finding{{Clause: Clause{ID: "LIST-2"}, Verdict: Excepted}}, true},
		"good list": {"it was seen to be complete", []Finding{{Clause: Clause{ID: "LIST-2"}, Verdict: Passed}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := bustest.Server(t, embedded.Options{})
			startProcess(t, srv.URL(), traits{fault: "DELETE-1"}) // the delete of an absent instance fails
			s, err := open(t.Context(), testConfig(srv.URL()))
			if err != nil {
				t.Fatal(err)
			}
			defer s.bench.Close()
			if err := s.run(t.Context(), func(c *check) { c.NewMachine() }); err != nil {
				t.Fatal(err)
			}
			report := &Report{Findings: tc.findings}
			s.finally(t.Context(), report)
			if (report.Left != "") != tc.left || tc.left == (len(report.Notes) > 0) {
				t.Errorf("%s: left %q, notes %q", tc.reason, report.Left, report.Notes)
			}
		})
	}
}

// What cannot be removed is named, so that a person can remove it.
func TestCheck_Left(t *testing.T) {
	t.Parallel()
	srv := bustest.Server(t, embedded.Options{})
	startProcess(t, srv.URL(), traits{fault: "DELETE-3"})
	cfg := testConfig(srv.URL())
	cfg.Only, cfg.Timeout, cfg.Patience = []string{"CREATE-1"}, time.Second, time.Second
	report, err := Check(t.Context(), cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	summary, junit := written(t, report)
	if report.OK() || !strings.Contains(summary, "NOT CLEANED UP: instances may be left: acme:///1 of machine conformance-") {
		t.Errorf("want the instance named:\n%s", summary)
	}
	if !strings.Contains(junit, `failures="1"`) || !strings.Contains(junit, "acme:///1") {
		t.Errorf("want a failure that names the instance:\n%s", junit)
	}
}

// written returns both forms of a report.
func written(t *testing.T, report *Report) (summary, junit string) {
	t.Helper()
	var texts [2]strings.Builder
	if err := errors.Join(report.WriteSummary(&texts[0]), report.WriteJUnit(&texts[1])); err != nil {
		t.Fatal(err)
	}

	return texts[0].String(), texts[1].String()
}
