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
	if known, err := f.of("a", now.Add(nodeRetry-1)); !known || !errors.Is(err, first) {
		t.Errorf("before it is tried again: %t, %v", known, err)
	}
	if known, err := f.of("a", now.Add(nodeRetry)); !known || err != nil {
		t.Errorf("when it is to be tried again: %t, %v", known, err)
	}
	if known, err := f.of("c", now); known || err != nil {
		t.Errorf("of one without faults: %t, %v", known, err)
	}
	f.note("b", first, now.Add(nodeRetry))
	if known, err := f.of("b", now.Add(2*nodeRetry-1)); !known || !errors.Is(err, first) {
		t.Errorf("after it was tried again: %t, %v", known, err)
	}
	f.forget("b")
	if known, _ := f.of("b", now.Add(nodeRetry)); known {
		t.Error("one that was changed is known to fail")
	}
	f.note("c", second, now.Add(nodeForget))
	if _, ok := f.byName["a"]; ok {
		t.Error("it never forgets")
	}
}
