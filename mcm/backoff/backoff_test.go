package backoff_test

import (
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/machinebus/machinebus/mcm/backoff"
)

// TestUpTo fails as often as in a long outage.
func TestUpTo(t *testing.T) {
	t.Parallel()
	for _, longest := range []time.Duration{time.Second, time.Minute} {
		limiter := backoff.UpTo(longest)
		var last time.Duration
		for range 100 {
			wait := limiter.When(reconcile.Request{})
			if wait < last || wait > longest {
				t.Fatalf("after %s it is tried again in %s, of %s at most", last, wait, longest)
			}
			last = wait
		}
		if last != longest {
			t.Errorf("in the end it is tried every %s, want %s", last, longest)
		}
	}
}
