// Package freeze keeps a MachineSet that has far more machines than it should from
// making more. It is the safety net under the controllers that create machines: it
// counts for itself, and trusts none of them.
//
// It deletes nothing: bringing the number down is the work of the set, or of people.
//
// Its rules:
//
//   - A frozen set has the label freeze=True and the condition Frozen, and so has its
//     MachineDeployment. The label counts: the controllers of sets and deployments heed it.
//     The condition is for people. Each look restores whichever of them was lost.
//   - A set is counted in the caches, and again at the API server before it is frozen: its
//     replicas may have been raised since.
//   - A frozen set is counted whenever a machine goes or its limit may have changed, so that
//     it goes on as soon as it may. It stays frozen until the surplus is gone.
//   - A machine on its way out counts only if another machine was made since it began to go.
//     Each of those stands in for one. So a set whose machines are made and deleted without
//     end is frozen. A pool that drains slowly after a scale-in is not, nor is a set for one
//     machine that is stuck on its way out.
//   - A person ends a freeze early with the annotation safety.machine.sapcloud.io/unfreeze.
package freeze
