package main

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// TestMetric reads metrics of a manager that is there, and of one that is not.
func TestMetric(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("# HELP found what was\n# TYPE found gauge\nfound{class=\"a b\"} 2\nfound{class=\"c\"} 1\n" +
			"found_total 9\nplain 0\nleader_election_master_status{name=\"mcm\"} 1\nodd x\n"))
	}))
	t.Cleanup(server.Close)
	there := &stack.Manager{Address: strings.TrimPrefix(server.URL, "http://"), Process: &stack.Process{Name: "mcm-1"}}
	gone := &stack.Manager{Address: "127.0.0.1:1", Process: &stack.Process{Name: "mcm-2"}}
	for name, want := range map[string]float64{"found": 3, "found_total": 9, "plain": 0, "other": 0} {
		if got, err := metric(t.Context(), there, name); err != nil || got != want {
			t.Errorf("metric %s is %g, %v, want %g", name, got, err, want)
		}
	}
	if _, err := metric(t.Context(), there, "odd"); err == nil {
		t.Error("what is no number counts as one")
	}
	if lead, err := leads(t.Context(), there); err != nil || !lead {
		t.Errorf("it leads: %t, %v", lead, err)
	}
	if _, err := leads(t.Context(), gone); err == nil {
		t.Error("a manager that is not there has said whether it leads")
	}
	if err := shows("found", gone, there)(t.Context()); err != nil {
		t.Errorf("one of two managers shows it, and it is missed: %v", err)
	}
	for _, name := range []string{"plain", "other"} {
		if err := shows(name, gone, there)(t.Context()); !errors.Is(err, errMissed) {
			t.Errorf("metric %s is 0, and the fault counts: %v", name, err)
		}
	}
}
