package dispatch

import (
	"testing"
	"time"
)

// A driver that never can say what came of an operation is not asked for it in a hot
// loop.
func TestUnknownWait(t *testing.T) {
	t.Parallel()
	for attempts, want := range map[uint32]time.Duration{
		1: 2 * time.Second, 2: 4 * time.Second, 6: 64 * time.Second, 7: 128 * time.Second, 1000: 128 * time.Second,
	} {
		if got := unknownWait(attempts); got != want {
			t.Errorf("after %d attempts it waits %s, want %s", attempts, got, want)
		}
	}
}
