package replica

import (
	"testing"
	"time"
)

// A machine that was suspended does not know by its monotonic clock.
func TestElapsedByEitherClock(t *testing.T) {
	t.Parallel()
	from := time.Now()
	if got := elapsed(from, from.Add(time.Second)); got != time.Second {
		t.Errorf("elapsed = %s, want 1s", got)
	}
	// Only the wall clock has moved: Round strips the monotonic reading.
	if got := elapsed(from.Round(0), from.Add(time.Minute).Round(0)); got != time.Minute {
		t.Errorf("elapsed = %s, want 1m", got)
	}
	if got := elapsed(from, from.Add(time.Second).Round(0).Add(-time.Hour)); got > 0 {
		t.Errorf("elapsed = %s with the clock set back and no monotonic reading", got)
	}
}
