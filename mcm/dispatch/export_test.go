package dispatch

import (
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// Patient sets how long an operation waits for its turn before the dispatcher notifies.
func (d *Dispatcher) Patient(wait time.Duration) { d.patient = wait }

// Queued reports whether a machine's operation waits for its turn.
func (d *Dispatcher) Queued(uid types.UID) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	e, ok := d.machines[uid]

	return ok && d.queue.contains(e.turn)
}
