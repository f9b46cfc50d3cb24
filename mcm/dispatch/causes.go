package dispatch

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/go-logr/logr"
)

// causes are what operations wait for, and when the log said so last: a cause that
// many have in common is one line, not one for each of them. Its methods are safe for
// concurrent use; the zero value is ready.
type causes struct {
	mu    sync.Mutex
	noted map[string]time.Time // by reason, which names the provider
}

// note logs a reason to wait unless the log has it from the last minute.
func (c *causes) note(ctx context.Context, provider, reason string) {
	now := time.Now()
	c.mu.Lock()
	if c.noted == nil {
		c.noted = map[string]time.Time{}
	}
	last, known := c.noted[reason]
	news := !known || now.Sub(last) >= noteEvery
	if news {
		maps.DeleteFunc(c.noted, func(_ string, at time.Time) bool { return now.Sub(at) >= noteEvery })
		c.noted[reason] = now
	}
	c.mu.Unlock()
	if news {
		logr.FromContextOrDiscard(ctx).Info("operations wait; mcmctl ops lists them", "provider", provider, "reason", reason)
	}
}
