//go:build !unfenced

package bus

// unfencedBuild is what tells a replica to go on when it may have been replaced.
// Only a build with the tag "unfenced" does, so that no flag, environment or
// configuration can: `make faults FENCING=off` shows with it what fencing is good for.
const unfencedBuild = false
