package orphans

import "time"

// Settings are a Collector's periods and limits.
type Settings struct {
	// Period is the time between two looks.
	Period time.Duration
	// Retry is the time after which providers are looked at again whose classes could not
	// be listed, if it is shorter than Period.
	Retry time.Duration
	// Gap is the least time between two looks out of turn.
	Gap time.Duration
	// Grace is how long an instance must have been without a machine, in every look of
	// that time, before it is deleted.
	Grace time.Duration
	// MaxPerPass is the maximum number of deletes at each provider after one look.
	MaxPerPass int
	// DryRun reports instances without a machine, by Event and metric, but deletes none.
	DryRun bool
	// NodeGrace is how old a Node without a machine must be to be marked.
	NodeGrace time.Duration
	// DeleteTimeout is how long one delete may take.
	DeleteTimeout time.Duration
	// AdoptOwners are the uids of control clusters whose instances this one has taken over;
	// [NoOwner] stands for instances without an owner.
	AdoptOwners []string
	// DefaultProvider is the driver for classes that name none; may be empty.
	DefaultProvider string
	// Namespace is the only one that is served; empty means all.
	Namespace string
}

// NoOwner in Settings.AdoptOwners stands for instances without an owner.
const NoOwner = "none"

// DefaultSettings returns settings with the periods of the machine controller manager,
// which has no grace period.
func DefaultSettings() Settings {
	return Settings{
		Period: 15 * time.Minute, Retry: 10 * time.Minute, Gap: time.Minute, Grace: 20 * time.Minute, MaxPerPass: 10,
		NodeGrace: 20 * time.Minute, DeleteTimeout: 10 * time.Minute,
	}
}
