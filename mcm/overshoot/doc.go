// Package overshoot keeps a MachineSet that has far more machines than it should from
// making more: it freezes the set. It is the safety net under the controllers that create
// machines: it counts for itself, and trusts none of them.
//
// It deletes nothing: bringing the number down is the work of the set, or of people.
//
// Its rules:
//
//   - A frozen set has the label freeze=True and the condition Frozen, and so has its
//     MachineDeployment. The label counts: the controllers of sets and deployments heed it.
//     The condition is for people. Each count restores whichever of them was lost.
//   - A set is counted in the caches, and again at the API server before it is frozen: its
//     replicas may have been raised since.
//   - A frozen set is counted whenever a machine is deleted or its limit may have changed.
//     It stays frozen until the surplus is gone.
//   - A machine in deletion counts only if another machine was created since its deletion
//     began; each new machine makes one of them count. So a set whose machines are created
//     and deleted without end is frozen. A pool that drains slowly after a scale-in is not,
//     nor is a set for one machine whose deletion is stuck.
//   - A person ends a freeze early with the annotation safety.machine.sapcloud.io/unfreeze.
package overshoot
