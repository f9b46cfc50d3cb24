package dispatch

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/go-logr/logr"
)

// A waitLog logs the reasons for which operations wait, each at most once a minute however
// many operations share it. It is safe for concurrent use; the zero value is ready.
type waitLog struct {
	mu     sync.Mutex
	logged map[string]time.Time // by reason, which names the provider
}

// log logs a reason unless it was logged within the last minute.
func (c *waitLog) log(ctx context.Context, provider, reason string) {
	now := time.Now()
	c.mu.Lock()
	if c.logged == nil {
		c.logged = map[string]time.Time{}
	}
	last, known := c.logged[reason]
	isDue := !known || now.Sub(last) >= logEvery
	if isDue {
		maps.DeleteFunc(c.logged, func(_ string, at time.Time) bool { return now.Sub(at) >= logEvery })
		c.logged[reason] = now
	}
	c.mu.Unlock()
	if isDue {
		logr.FromContextOrDiscard(ctx).Info("operations wait; mcmctl ops lists them", "provider", provider, "reason", reason)
	}
}
