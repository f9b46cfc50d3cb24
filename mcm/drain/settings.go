package drain

import (
	"cmp"
	"time"
)

// Settings are a Drainer's periods and limits. Zero values mean the defaults.
type Settings struct {
	// EvictRetry is the time between two tries of a refused eviction; 20 s by default, as in
	// MCM. A pod's budget may take this long to notice that another pod is ready.
	EvictRetry time.Duration
	// Poll is the time between two checks whether evicted pods are gone; 2 s by default.
	// Each check is two requests.
	Poll time.Duration
	// DetachTimeout is how long a volume may stay attached after its pod has ended, before
	// the drain fails; 2 minutes by default.
	DetachTimeout time.Duration
	// ReattachTimeout is how long the next pod with volumes waits until those of the last one
	// are attached to another Node; 90 s by default.
	ReattachTimeout time.Duration
	// Requests is the maximum number of requests in flight, of all drains together; 20 by
	// default. A waiting drain uses none.
	Requests int
}

func (s Settings) withDefaults() Settings {
	s.EvictRetry = cmp.Or(s.EvictRetry, 20*time.Second)
	s.Poll = cmp.Or(s.Poll, 2*time.Second)
	s.DetachTimeout = cmp.Or(s.DetachTimeout, 2*time.Minute)
	s.ReattachTimeout = cmp.Or(s.ReattachTimeout, 90*time.Second)
	s.Requests = cmp.Or(s.Requests, 20)

	return s
}
