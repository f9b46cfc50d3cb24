package dispatch

import (
	"fmt"
	"math"
	"time"

	"golang.org/x/time/rate"
)

// Limits bound what is asked of the drivers. The zero value is no limit but the
// drivers' own slots. Reads are not limited.
type Limits struct {
	// Provider bounds what all classes of one provider ask for together, Secret
	// what is asked for with the same credentials.
	Provider, Secret Limit
}

// A Limit bounds operations.
type Limit struct {
	// InFlight is how many creates may run at once, and as many initializes and as
	// many deletes: each kind has its own, so that none waits for the others' to
	// end. 0 means any number.
	InFlight int
	// PerSecond is how many operations of all kinds may begin each second, where a
	// second's worth may begin at once. 0 means any number.
	PerSecond float64
}

// DefaultLimits are far above what a healthy cloud is asked for, and keep what
// runs wild within what a cloud's account usually takes.
func DefaultLimits() Limits {
	return Limits{Provider: Limit{InFlight: 5000, PerSecond: 500}, Secret: Limit{InFlight: 2500, PerSecond: 250}}
}

// A quota is what is left of a Limit.
type quota struct {
	limit    Limit
	inFlight map[Kind]int
	bucket   *rate.Limiter // nil where the rate has no limit
}

func newQuota(limit Limit) *quota {
	q := &quota{limit: limit, inFlight: map[Kind]int{}}
	if limit.PerSecond > 0 {
		q.bucket = rate.NewLimiter(rate.Limit(limit.PerSecond), max(1, int(math.Ceil(limit.PerSecond))))
	}

	return q
}

// room tells whether one more operation of a kind may run.
func (q *quota) room(kind Kind) bool {
	return q.limit.InFlight <= 0 || q.inFlight[kind] < q.limit.InFlight
}

// delay is how long until one more operation may begin.
func (q *quota) delay(now time.Time) time.Duration {
	if q.bucket == nil {
		return 0
	}
	missing := 1 - q.bucket.TokensAt(now)
	if missing <= 0 {
		return 0
	}
	// A timer that is early by a rounding error would have to be set again.
	return time.Duration(missing/q.limit.PerSecond*float64(time.Second)) + time.Millisecond
}

// take counts an operation as running. One that a manager takes up again was
// begun before, and no longer counts as begun.
func (q *quota) take(kind Kind, again bool, now time.Time) {
	q.inFlight[kind]++
	if q.bucket != nil && !again {
		q.bucket.ReserveN(now, 1)
	}
}

func (q *quota) give(kind Kind) {
	q.inFlight[kind]--
	if q.inFlight[kind] == 0 {
		delete(q.inFlight, kind)
	}
}

// idle tells that a new quota would be the same.
func (q *quota) idle(now time.Time) bool {
	return len(q.inFlight) == 0 && (q.bucket == nil || q.bucket.TokensAt(now) >= float64(q.bucket.Burst()))
}

// full says which limit keeps an operation from running; "" for none.
func (q *quota) full(kind Kind, what, flag string, now time.Time) string {
	switch {
	case !q.room(kind):
		return fmt.Sprintf("%d operations %s of %s are in flight, as many as --%s-max-in-flight allows",
			q.limit.InFlight, kind, what, flag)
	case q.delay(now) > 0:
		return fmt.Sprintf("as many operations of %s begin each second as --%s-max-per-second allows (%g)",
			what, flag, q.limit.PerSecond)
	default:
		return ""
	}
}
