// Package replica is the answering side of operations: a [Server] takes requests for its
// provider from the bus, runs each in a [Handler], and keeps the outcome until the manager
// has stored it.
//
// Its rules:
//
//   - A request for an operation that the replica has is attached to it. The handler runs once.
//   - A mutation claims its machine before the replica accepts it, and writes the claim again
//     right before each call to the cloud. Without that record nothing begins (the fence).
//   - A result ends each attempt, also after a panic and for a call that ignores its deadline.
//   - A replica queues nothing. It refuses what it has no slot for.
//
// The package knows neither the driver's cloud nor its classes: that is driversdk. The asking
// side is package caller. bus/SAFETY.md argues why both sides together never do a mutation
// twice.
package replica
