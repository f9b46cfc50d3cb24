package dispatch

import (
	"sync"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// keptAudits is the number of outcomes that Newest can return.
const keptAudits = 200

// recent keeps the outcomes of the newest operations.
type recent struct {
	mu     sync.Mutex
	audits []*driverv1.Audit // a ring
	next   int
}

// add adds an outcome, which must not be changed afterwards.
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

// Newest returns the outcomes of the last operations, at most 200, the oldest first.
func (d *Dispatcher) Newest() []*driverv1.Audit {
	d.recent.mu.Lock()
	defer d.recent.mu.Unlock()
	r := &d.recent

	return append(append(make([]*driverv1.Audit, 0, len(r.audits)), r.audits[r.next:]...), r.audits[:r.next]...)
}
