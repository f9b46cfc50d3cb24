package drivertest

import (
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
	var summary, junit strings.Builder
	if err := report.WriteSummary(&summary); err != nil {
		t.Fatal(err)
	}
	if err := report.WriteJUnit(&junit); err != nil {
		t.Fatal(err)
	}
	if report.OK() || !strings.Contains(summary.String(), "NOT CLEANED UP: instances may be left: acme:///1 of machine conformance-") {
		t.Errorf("want the instance named:\n%s", summary.String())
	}
	if !strings.Contains(junit.String(), `failures="1"`) || !strings.Contains(junit.String(), "acme:///1") {
		t.Errorf("want a failure that names the instance:\n%s", junit.String())
	}
}
