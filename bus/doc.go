// Package bus is everything machinebus does with NATS, and nothing it does with
// Kubernetes: connections, subjects, envelopes, errors, sealing, and the two
// sides of an operation.
//
// The asking side is a [Caller]: [Caller.Call] has one operation done by
// whichever driver replica can do it, and survives the death of the replica that
// took it. The answering side is a [Server]: it takes operations from the
// queue group of its provider, runs each in a [Handler], and keeps what came of
// it until the asking side has stored it. Fetches go the other way: a
// [FetchClient] in the driver asks, [ServeFetches] in the manager answers.
//
// The package knows what an operation is called and whether it may be asked
// twice. It does not know what a machine is for: controllers are in mcm, and the
// interface that driver authors see is driversdk. The server that carries the
// messages is not here either: package embedded starts one in process.
//
// The wire contract is in proto/machinebus/driver/v1; clause ids such as
// [CREATE-1] in this package's comments refer to it.
package bus
