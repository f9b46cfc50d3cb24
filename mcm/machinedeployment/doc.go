// Package machinedeployment keeps MachineDeployments: for each version of a
// template it makes a MachineSet, and moves replicas from the old sets to the new
// one within the limits of the strategy. It also rolls back, pauses, scales,
// hands the cluster-autoscaler's wishes on to machines, and says in conditions
// how a rollout goes and which machine holds it up.
//
// Each file holds one step of a pass. How many replicas a set gets is worked out
// by functions without side effects (rolling.go, proportion.go); the steps carry
// it out. No step blocks: what a pass has to wait for starts the next one.
//
// It makes and deletes no Machines; MachineSets do. Updates in place are not
// carried out, see inplace.go.
package machinedeployment
