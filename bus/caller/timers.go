package caller

import (
	"sync"
	"time"
)

// timers keeps timers for the next ones who need one: a read's is started for
// nothing almost always. The zero value is ready, and safe for concurrent use.
type timers struct{ idle sync.Pool }

func (t *timers) start(d time.Duration) *time.Timer {
	if timer, ok := t.idle.Get().(*time.Timer); ok {
		timer.Reset(d)

		return timer
	}

	return time.NewTimer(d)
}

// stop takes back a timer that nobody else has. What it may have sent is gone
// then: no receive from a timer's channel after Stop or Reset sees an older time.
func (t *timers) stop(timer *time.Timer) {
	timer.Stop()
	t.idle.Put(timer)
}
