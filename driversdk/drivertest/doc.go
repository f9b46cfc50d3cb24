// Package drivertest is the conformance suite of the driver contract: one check
// for each clause id in proto/machinebus/driver/v1.
//
// It plays the manager's side on a bus and sees a driver only through the bus, so
// that it serves drivers in any language, full replicas and plain ones alike. A Go
// driver's tests call [Run]; cmd/driver-conformance calls [Check] for all
// others.
//
// Give it a bus and a cloud account of its own. It makes and removes instances,
// raises the epoch that replicas remember, puts claims of its own in the place of
// theirs, has the operations stream take none for a while and deletes it.
// It leaves node groups alone, but for those that its Config names; these have their
// sizes again at the end.
//
// What a driver calls at its cloud cannot be seen from a bus. Where a clause is
// about that, [Cloud] may lend a look; without it the clause is skipped, with the
// reason.
package drivertest
