//go:build !unfenced

package fencing

// unfencedBuild is true only in a build with the tag "unfenced": `make faults FENCING=off`
// shows with it what the fence prevents.
const unfencedBuild = false
