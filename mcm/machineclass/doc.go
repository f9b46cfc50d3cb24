// Package machineclass keeps what machines still need from being deleted: a
// MachineClass while a Machine refers to it, and a Secret while a MachineClass
// does. It does so with finalizers, and says by Events what a deletion waits for.
// For what was taken away all the same it has Removed. It also has the drivers
// check classes that are new or changed, and shows their answers as Events.
//
// It reacts to watches only. It decides nothing about machines, and does not tell
// drivers of changes; packages machine and fetch do.
package machineclass
