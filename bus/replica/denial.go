package replica

import (
	"time"

	"github.com/machinebus/machinebus/bus"
)

// denials are the operations that a replica denied having, by cluster and operation id.
// mcm relies on a denial: a request that arrives after it must not be taken [OPS-1].
type denials map[string]denial

type denial struct {
	attempt uint32
	at      time.Time
}

// denialKept is longer than any request can be under way: by then accept_by has passed.
const denialKept = 2 * bus.AcceptBy

func (d denials) add(key string, attempt uint32, now time.Time) {
	for k, old := range d {
		if now.Sub(old.at) > denialKept {
			delete(d, k)
		}
	}
	// A delayed question about an earlier attempt does not lower the number.
	d[key] = denial{attempt: max(attempt, d[key].attempt), at: now}
}

// covers reports whether op's attempt was denied.
func (d denials) covers(op *operation) bool {
	den, ok := d[op.key()]

	return ok && op.attempt <= den.attempt && op.started.Sub(den.at) <= denialKept
}
