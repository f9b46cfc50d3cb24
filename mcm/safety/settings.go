package safety

import "time"

// Settings say how instances without a machine are dealt with.
type Settings struct {
	// Period is the time between two looks.
	Period time.Duration
	// Retry is the time until the providers of classes that could not be listed are
	// looked at again, if that comes before the next turn.
	Retry time.Duration
	// Gap is the least time from one look out of turn to the next.
	Gap time.Duration
	// Grace is how long an instance must have been seen without a machine, in
	// every look of that time, before it is deleted.
	Grace time.Duration
	// MaxPerPass is how many of each provider are deleted after one look at most.
	MaxPerPass int
	// DryRun tells of them and deletes none.
	DryRun bool
	// NodeGrace is how old a Node must be to be marked as one without a machine.
	NodeGrace time.Duration
	// DeleteTimeout is how long one delete may take.
	DeleteTimeout time.Duration
	// AdoptOwners are the uids of former control clusters whose instances are ours now;
	// [NoOwner] stands for those that were made without an owner.
	AdoptOwners []string
	// DefaultProvider is the driver for classes that name none; may be empty.
	DefaultProvider string
	// Namespace is the only one that is served; empty means all.
	Namespace string
}

// NoOwner is, in Settings.AdoptOwners, for instances without an owner.
const NoOwner = "none"

// DefaultSettings look as often as the machine controller manager does, which
// knows no grace.
func DefaultSettings() Settings {
	return Settings{
		Period: 15 * time.Minute, Retry: 10 * time.Minute, Gap: time.Minute, Grace: 20 * time.Minute, MaxPerPass: 10,
		NodeGrace: 20 * time.Minute, DeleteTimeout: 10 * time.Minute,
	}
}
