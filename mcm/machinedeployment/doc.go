// Package machinedeployment keeps MachineDeployments: for each version of a
// template it makes a MachineSet, and moves replicas from the old sets to the new
// one within the limits of the strategy. It also rolls back, pauses, scales,
// hands the cluster-autoscaler's wishes on to machines, and shows in conditions
// how a rollout goes and which machine holds it up.
//
// A pass ties together one type for each part of the work, such as scaling, rollout and
// progress. Functions without side effects work out how many replicas a set gets, and the
// steps carry it out. No step blocks: the event that a pass waits for starts the next one.
//
// It makes and deletes no Machines; MachineSets do. It carries out no updates in place.
// README.md has the rules of counting, of stale caches, and of the autoscaler's choice.
package machinedeployment
