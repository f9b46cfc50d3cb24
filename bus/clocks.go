package bus

import "time"

// Clocks that both sides of an operation go by.
const (
	// SessionInterval is the time between a replica's signs of life.
	SessionInterval = 500 * time.Millisecond
	// AcceptBy is how old a mutation's request may be when a replica takes it.
	AcceptBy = 2 * time.Second
	// DefaultTimeout is how long an attempt may take unless its request says otherwise.
	DefaultTimeout = time.Minute
)
