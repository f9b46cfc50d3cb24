// Package autoscaler lets the stock cluster-autoscaler scale MachineDeployments: it
// serves the autoscaler's provider "externalgrpc", in the dialects of all its
// versions since 1.25. A node group is a MachineDeployment that is marked as one.
//
// All reads are answered from memory: from a snapshot of the caches that each Refresh
// replaces, with our own writes added at once. A scale-up or scale-down is one update of the
// MachineDeployment, under its resource version. Annotations on it name the machines to
// delete.
//
// Node groups that live in a cloud are the second source: their drivers serve them over the
// bus, under ids with a prefix of their own, and are asked in the background (see [Provided]).
//
// The package creates and deletes no machines; the controllers of sets and deployments do.
// README.md has the rules by which it answers.
package autoscaler
