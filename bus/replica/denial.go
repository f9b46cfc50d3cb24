package replica

import (
	"time"

	"github.com/machinebus/machinebus/bus"
)

// denials are the operations a replica has said it does not hold, by cluster and
// operation id. mcm acts on that word, so it must stay true: a request that was
// overtaken on its way by the question must not be taken after the answer
// [OPS-1].
type denials map[string]denial

type denial struct {
	attempt uint32
	at      time.Time
}

// denialKept is longer than any request can be on its way: by then accept_by
// has passed.
const denialKept = 2 * bus.AcceptBy

func (d denials) add(key string, attempt uint32, now time.Time) {
	for k, old := range d {
		if now.Sub(old.at) > denialKept {
			delete(d, k)
		}
	}
	// A question about an earlier attempt may come late: it takes nothing back.
	d[key] = denial{attempt: max(attempt, d[key].attempt), at: now}
}

// covers tells that h's attempt was denied.
func (d denials) covers(h *operation) bool {
	den, ok := d[h.key()]

	return ok && h.attempt <= den.attempt && h.started.Sub(den.at) <= denialKept
}
