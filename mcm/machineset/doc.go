// Package machineset keeps as many machines as a MachineSet asks for: it makes
// what lacks, deletes what is too much in a fixed order, replaces what Failed, and
// hands changes of the template that need no new machine down to those there are.
//
// Most passes over a set only read the cache. A pass that finds something to create,
// delete or adopt there reads set and machines from the API server first, and acts on
// that alone. So a cache that lags behind costs a request and never a machine. README.md
// says why.
//
// A set only makes and deletes Machine objects. Their instances, Nodes and status
// are the business of the machine controller, ours or another one; how sets
// follow each other in a rollout is that of machine deployments.
package machineset
