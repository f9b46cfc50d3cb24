package dispatch

import (
	"fmt"
	"math"
	"time"

	"golang.org/x/time/rate"
)

// Limits bound the operations at drivers. The zero value is no limit besides the drivers'
// own slots. Reads are not limited.
type Limits struct {
	// Provider bounds the operations of all classes of one provider, Secret those with the
	// same credentials.
	Provider, Secret Limit
}

// A Limit bounds operations.
type Limit struct {
	// InFlight bounds the operations in flight of each kind, so that creates, initializes and
	// deletes do not wait for each other. 0 means any number.
	InFlight int
	// PerSecond bounds the operations of all kinds that begin each second; those of one
	// second may begin at once. 0 means any number.
	PerSecond float64
}

// DefaultLimits returns limits far above normal use. They keep a runaway fleet within the
// usual quota of a cloud account.
func DefaultLimits() Limits {
	return Limits{Provider: Limit{InFlight: 5000, PerSecond: 500}, Secret: Limit{InFlight: 2500, PerSecond: 250}}
}

// A quota counts operations against a Limit.
type quota struct {
	limit    Limit
	inFlight map[Kind]int
	bucket   *rate.Limiter // nil if the rate has no limit
}

func newQuota(limit Limit) *quota {
	q := &quota{limit: limit, inFlight: map[Kind]int{}}
	if limit.PerSecond > 0 {
		q.bucket = rate.NewLimiter(rate.Limit(limit.PerSecond), max(1, int(math.Ceil(limit.PerSecond))))
	}

	return q
}

// room reports whether one more operation of a kind may run.
func (q *quota) room(kind Kind) bool {
	return q.limit.InFlight <= 0 || q.inFlight[kind] < q.limit.InFlight
}

// delay returns the time until one more operation may begin.
func (q *quota) delay(now time.Time) time.Duration {
	if q.bucket == nil {
		return 0
	}
	missing := 1 - q.bucket.TokensAt(now)
	if missing <= 0 {
		return 0
	}
	// One millisecond more, so that a rounding error does not make the timer early.
	return time.Duration(missing/q.limit.PerSecond*float64(time.Second)) + time.Millisecond
}

// take counts an operation as running. A resumed operation does not count against the rate.
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

// idle reports whether a new quota would be the same.
func (q *quota) idle(now time.Time) bool {
	return len(q.inFlight) == 0 && (q.bucket == nil || q.bucket.TokensAt(now) >= float64(q.bucket.Burst()))
}

// full returns which limit keeps an operation from running; "" for none.
func (q *quota) full(kind Kind, what, flag string, now time.Time) string {
	switch {
	case !q.room(kind):
		return fmt.Sprintf("operations in flight (%s) of %s: %d, the limit of --%s-max-in-flight; the next one starts when one ends",
			kind, what, q.limit.InFlight, flag)
	case q.delay(now) > 0:
		return fmt.Sprintf("operations of %s that start each second: %g, the limit of --%s-max-per-second",
			what, q.limit.PerSecond, flag)
	default:
		return ""
	}
}
