// Package autoscaler lets the stock cluster-autoscaler scale MachineDeployments: it
// serves the autoscaler's provider "externalgrpc", in the dialects of all its
// versions since 1.25. A node group is a MachineDeployment that is marked as one.
//
// Everything that is read comes from memory: a snapshot of the caches, taken anew
// at each Refresh, with our own writes added at once. A scale-up or scale-down is
// one update of the MachineDeployment, under its resource version, with the
// annotations by which its controller learns which machines have to go.
//
// It makes and removes no machines; the controllers of sets and deployments do. Node
// groups that a driver serves over the bus would be another source of groups beside
// mark.go, under ids with a prefix of their own.
package autoscaler
