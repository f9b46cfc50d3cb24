// Package backoff limits how long a controller waits before it retries a pass that
// returned an error. controller-runtime's own limiter grows to 17 minutes. That is too
// long: an error discards the pass's RequeueAfter, and no event reports that its cause
// (a webhook, a quota) is gone.
//
// It is not for errors of providers: package machine retries those by their code.
package backoff

import (
	"time"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

const first = 5 * time.Millisecond

// UpTo returns a limiter whose pause doubles with each error from 5 ms to longest.
func UpTo(longest time.Duration) workqueue.TypedRateLimiter[reconcile.Request] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](first, longest)
}
