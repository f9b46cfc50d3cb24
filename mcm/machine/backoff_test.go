package machine

import (
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// TestBackoff fails as often as in a long outage.
func TestBackoff(t *testing.T) {
	t.Parallel()
	limiter := backoff()
	var last time.Duration
	for range 100 {
		wait := limiter.When(reconcile.Request{})
		if wait < last || wait > time.Minute {
			t.Fatalf("after %s it is tried again in %s", last, wait)
		}
		last = wait
	}
	if last != time.Minute {
		t.Errorf("in the end it is tried every %s", last)
	}
}
