// Package fencing says whether replicas of this build obey the fence: whether an attempt
// that another one has superseded begins no call. The package is internal, so no flag,
// environment or configuration outside of bus can switch the fence off.
package fencing

// A Mode says whether one replica obeys the fence. The zero value is as the build says.
type Mode int

const (
	// AsBuilt obeys the fence unless the build has the tag "unfenced".
	AsBuilt Mode = iota
	// Disobeyed begins calls without asking, for tests of what the fence prevents.
	Disobeyed
)

// Off reports whether the replica ignores the fence.
func (m Mode) Off() bool { return unfencedBuild || m == Disobeyed }
