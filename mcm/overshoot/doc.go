// Package overshoot keeps a MachineSet that has far more machines than it should from
// making more: it freezes the set. It is the safety net under the controllers that create
// machines: it counts what is there, and trusts none of them.
//
// A frozen set has the label freeze=True and the condition Frozen, and so has its
// MachineDeployment. The label is what counts; the controllers of sets and
// deployments heed it. Nothing is deleted here: bringing the number down is the
// work of the set, or of people. A person ends a freeze early with the annotation
// safety.machine.sapcloud.io/unfreeze.
package overshoot
