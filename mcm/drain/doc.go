// Package drain empties Nodes before their instances are deleted. It never makes a
// reconciler wait: Start returns the drain's state at once, and Notify's function is called
// when the drain has ended or is blocked.
//
// Pods with PersistentVolumes go one after the other, and each drain waits until their volumes
// are detached: mcm/decisions/2026-11-25-a-drain-waits-for-volumes.md says why and how.
//
// kubectl's package drain decides which pods are evicted. This package adds retries of
// refused evictions, deadlines, a limit on requests, forced drains, and a stop when the
// machine's deletion does not need the drain any more. The machine controller decides when
// to drain.
package drain
