// Package machineclass keeps what machines still need from being deleted: a
// MachineClass while a Machine refers to it, and a Secret while a MachineClass
// does. It does so with finalizers, and says by Events what a deletion waits for.
// It reacts to watches only. It decides nothing about machines and announces no changes to
// drivers; packages machine and fetch do.
//
// A class or Secret may be removed by force, finalizer and all. [Removed] then remembers in
// memory what it saw go while machines needed it, until the object is back or the last
// machine is gone. Drivers fetch it as before. Every replica of mcm does so. A Secret is
// never written anywhere, so nothing is left once all replicas were restarted.
//
// [Validator] has the driver check each new version of a class and its Secrets, outside of
// the reconcilers, and shows the answer as Events. It waits for a replica without asking,
// and takes the silence of a driver without that ability for an answer.
package machineclass
