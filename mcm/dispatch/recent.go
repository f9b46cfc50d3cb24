package dispatch

import (
	"sync"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// keptAudits is how many of the newest outcomes are remembered for people.
const keptAudits = 200

// recent remembers what came of the newest operations.
type recent struct {
	mu     sync.Mutex
	audits []*driverv1.Audit // in a circle
	next   int
}

// add remembers an outcome, which must not be changed any more.
func (r *recent) add(audit *driverv1.Audit) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.audits) < keptAudits {
		r.audits = append(r.audits, audit)

		return
	}
	r.audits[r.next] = audit
	r.next = (r.next + 1) % keptAudits
}

// Newest returns what came of the last operations that ended, 200 of them at
// most, the oldest first.
func (d *Dispatcher) Newest() []*driverv1.Audit {
	d.recent.mu.Lock()
	defer d.recent.mu.Unlock()
	r := &d.recent

	return append(append(make([]*driverv1.Audit, 0, len(r.audits)), r.audits[r.next:]...), r.audits[:r.next]...)
}
