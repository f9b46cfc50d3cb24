package stack

import (
	"slices"
	"strings"
	"testing"
)

// TestRestart runs a killed process again: under its name, in its place, with
// logs of its own.
func TestRestart(t *testing.T) {
	t.Parallel()
	s := newTestSite(t)
	p := startRole(t, s, "careless")
	startRole(t, s, "obedient")
	if _, err := s.Restart(p); err == nil || !strings.Contains(err.Error(), "careless still runs") {
		t.Fatalf("Restart() of what still runs = %v", err)
	}
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	again, err := s.Restart(p, "--more")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := again.line(t.Context(), "ready "); err != nil || got != "42" {
		t.Errorf("line() = %q, %v, want that of the second run", got, err)
	}
	if again.Name != p.Name || again.Log == p.Log || !slices.Equal(again.command.args, append(slices.Clone(p.command.args), "--more")) {
		t.Errorf("restarted as %s with arguments %v and log %s", again.Name, again.command.args, again.Log)
	}
	if len(s.processes) != 2 || s.processes[0] != again {
		t.Error("it has lost its place: what depends on it would be stopped after it")
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
