// Package autoscaler lets the stock cluster-autoscaler scale MachineDeployments: it
// serves the autoscaler's provider "externalgrpc", in the dialects of all its
// versions since 1.25. A node group is a MachineDeployment that is marked as one.
//
// Everything that is read comes from memory: a snapshot of the caches, taken anew
// at each Refresh, with our own writes added at once. A scale-up or scale-down is
// one update of the MachineDeployment, under its resource version, with the
// annotations by which its controller learns which machines have to go.
//
// Node groups that live in a cloud are the second source: their drivers serve them
// over the bus, under ids with a prefix of their own, and are asked in the background
// (see [Provided]).
//
// It makes and removes no machines; the controllers of sets and deployments, and
// those clouds, do. README.md has the rules by which it answers.
package autoscaler
