package dispatch

import "time"

// Patient sets how long an operation waits for its turn before that is told.
func (d *Dispatcher) Patient(wait time.Duration) { d.patient = wait }
