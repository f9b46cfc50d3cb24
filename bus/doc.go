// Package bus is everything machinebus does with NATS that both sides of an operation
// share, and nothing it does with Kubernetes: connections, subjects, envelopes, errors,
// sealing, and fetches of classes and secrets.
//
// An operation has two sides, each in a package of its own:
//
//   - [github.com/machinebus/machinebus/bus/caller] asks. It has one operation done by
//     whichever driver replica can do it, and survives the death of that replica.
//   - [github.com/machinebus/machinebus/bus/replica] answers. It takes operations from the
//     queue group of its provider, runs each, and keeps the outcome until it is stored.
//
// Fetches go the other way: a [FetchClient] in the driver asks, [ServeFetches] in the manager
// answers.
//
// The package does not know what a machine is for: controllers are in mcm, and the interface
// that driver authors see is driversdk. The server that carries the messages is in package
// embedded.
//
// OPERATIONS.md says how an operation gets done, STREAMS.md how claims are kept, FAILURES.md
// what can fail, and SAFETY.md why a machine is made once. Folder decisions has the reasons.
// The wire contract is in proto/machinebus/driver/v1, and clause ids such as [CREATE-1] in
// comments refer to it.
package bus
