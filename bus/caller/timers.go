package caller

import (
	"sync"
	"time"
)

// timers pools timers, as almost no read's timer ever fires. The zero value is ready to
// use. It is safe for concurrent use.
type timers struct{ idle sync.Pool }

func (t *timers) start(d time.Duration) *time.Timer {
	if timer, ok := t.idle.Get().(*time.Timer); ok {
		timer.Reset(d)

		return timer
	}

	return time.NewTimer(d)
}

// stop returns a timer to the pool; its user must not keep it. No receive from a timer's
// channel after Stop or Reset sees an older time.
func (t *timers) stop(timer *time.Timer) {
	timer.Stop()
	t.idle.Put(timer)
}
