// Package machinedeployment keeps MachineDeployments: for each version of a
// template it makes a MachineSet, and moves replicas from the old sets to the new
// one within the limits of the strategy. It also rolls back, pauses, scales,
// hands the cluster-autoscaler's wishes on to machines, and shows in conditions
// how a rollout goes and which machine holds it up.
//
// A pass (pass.go) ties together one type for each part of the work, such as scaling,
// rollout and progress. How many replicas a set gets is computed by functions without
// side effects (rolling.go, proportion.go); the steps carry it out. No step blocks: the
// event that a pass waits for starts the next one.
//
// It makes and deletes no Machines; MachineSets do. Updates in place are not
// carried out, see inplace.go.
package machinedeployment
