package drain

import (
	"cmp"
	"time"
)

// Settings are a Drainer's clocks and limits. Zero values mean the defaults.
type Settings struct {
	// EvictRetry is how long after a refused eviction it is tried again; 20 s by
	// default, as MCM has it. A pod's budget may take this long to notice that
	// another pod has become ready.
	EvictRetry time.Duration
	// Poll is how often it is looked whether evicted pods have ended; 2 s by
	// default. Each look is two requests.
	Poll time.Duration
	// Requests is how many requests are under way at once, of all drains together;
	// 20 by default. A drain that waits takes none.
	Requests int
}

func (s Settings) withDefaults() Settings {
	s.EvictRetry = cmp.Or(s.EvictRetry, 20*time.Second)
	s.Poll = cmp.Or(s.Poll, 2*time.Second)
	s.Requests = cmp.Or(s.Requests, 20)

	return s
}
