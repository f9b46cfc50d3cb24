package machinedeployment

import (
	"errors"
	"testing"
	"time"
)

func TestNodeFaults(t *testing.T) {
	t.Parallel()
	var f nodeFaults
	now := time.Date(2026, 8, 11, 7, 0, 0, 0, time.UTC)
	first, second := errors.New("first"), errors.New("second")
	f.note("a", first, now)
	f.note("b", second, now.Add(nodeRetry/2))
	if err := f.recent("a", now.Add(nodeRetry-1)); !errors.Is(err, first) {
		t.Errorf("before it is tried again: %v", err)
	}
	if err := f.recent("a", now.Add(nodeRetry)); err != nil {
		t.Errorf("when it is to be tried again: %v", err)
	}
	if err := f.recent("c", now); err != nil {
		t.Errorf("of one without faults: %v", err)
	}
	f.note("b", first, now.Add(nodeRetry))
	if _, ok := f.byName["a"]; ok || len(f.byName) != 1 {
		t.Errorf("remembers what is over: %v", f.byName)
	}
	if err := f.recent("b", now.Add(2*nodeRetry-1)); !errors.Is(err, first) {
		t.Errorf("after it was tried again: %v", err)
	}
}
