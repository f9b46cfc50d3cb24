// Package replica is the answering side of operations: a [Server] takes requests for its
// provider from the bus, runs each in a [Handler], and keeps the outcome until the manager
// has stored it.
//
// One file is one step of an operation's life: receive.go takes a request, operations.go
// admits it, claim.go claims its machine, worker.go runs it, begin.go lets a call to the
// cloud begin (the fence), outbox.go sends frames, kept.go keeps results, stuck.go gives up
// calls that ignore their deadlines. heartbeat.go says what the replica holds, discovery.go
// answers `nats micro`.
//
// The package knows neither the driver's cloud nor its classes: that is driversdk. The asking
// side is package caller.
package replica
