// Package backoff says how long a controller waits before it looks again at an object
// whose last pass met an error. What a pass was told to do at some time is lost with its
// error, and what is put right (a webhook that refused, a quota) comes without an event:
// controller-runtime's own pause, which grows to 17 minutes, is too long for either.
//
// It is not for what goes wrong at providers: that is tried again by its code.
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
