package machine

import (
	"time"

	"github.com/machinebus/machinebus/mcm/drain"
)

// Settings are the controller's clocks and defaults.
type Settings struct {
	// DefaultProvider is the driver for classes that name none; may be empty.
	DefaultProvider string
	// CreationTimeout is how long a machine may take to join, unless it says
	// otherwise; HealthTimeout how long it may be unhealthy.
	CreationTimeout, HealthTimeout time.Duration
	// InPlaceUpdateTimeout is how long an update in place that another manager has started
	// may take, unless the machine says otherwise.
	InPlaceUpdateTimeout time.Duration
	// MaxReplacements is how many machines of a deployment may be replaced at a time
	// because they were unhealthy for too long; at least 1.
	MaxReplacements int
	// PreserveTimeout is how long a machine is preserved, unless it says otherwise.
	PreserveTimeout time.Duration
	// OperationTimeout is how long one attempt at a create, initialize or delete
	// may take, unless the class says otherwise; ReadTimeout is that of a status.
	OperationTimeout, ReadTimeout time.Duration
	// NodeConditions are the condition types that, when not False, make a Node
	// unhealthy.
	NodeConditions []string
	// DrainPolicy says how long and how hard Nodes are drained.
	DrainPolicy drain.Policy
	// Retry says when a failed operation is tried again.
	Retry Retry
}

// Retry are the periods after which a failed operation is tried again. Which
// one applies depends on the operation and its code.
type Retry struct {
	Short, Medium, Long time.Duration
	// ResourceExhausted applies to creates that found no capacity.
	ResourceExhausted time.Duration
}

// DefaultSettings are those of the machine controller manager.
func DefaultSettings() Settings {
	return Settings{
		CreationTimeout:      20 * time.Minute,
		HealthTimeout:        10 * time.Minute,
		InPlaceUpdateTimeout: 20 * time.Minute,
		MaxReplacements:      1,
		PreserveTimeout:      96 * time.Hour,
		OperationTimeout:     10 * time.Minute, ReadTimeout: time.Minute,
		NodeConditions: []string{"KernelDeadlock", "ReadonlyFilesystem", "DiskPressure", "NetworkUnavailable"},
		DrainPolicy:    drain.DefaultPolicy(),
		Retry: Retry{
			Short: 5 * time.Second, Medium: 3 * time.Minute, Long: 10 * time.Minute,
			ResourceExhausted: 10 * time.Minute,
		},
	}
}
