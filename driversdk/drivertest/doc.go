// Package drivertest is the conformance suite of the driver contract: one check
// for each clause id in proto/machinebus/driver/v1.
//
// It plays the manager's side on a bus and sees a driver only through the bus, so
// that it serves drivers in any language, full replicas and plain ones alike. A Go
// driver's tests call [Run]; cmd/driver-conformance calls [Check] for all
// others.
//
// It first looks whether the driver answers, accepts the class and reaches its cloud: if
// not, no clause is checked, and the error says what to mend. At the end it deletes what the
// list shows of its machines, also instances that appear late; the report names what it
// could not delete. An instance may even come after that, if the outcome of its create is
// unknown: the report then says what to look for in the cloud.
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
//
// A driver may be unable to keep a clause, such as one whose cloud has no tags. Name it in
// Config.Except, with the reason and what it costs the operator. The report then has both,
// and the clause does not fail the run.
//
// Its rules:
//
//   - It holds back a class to stop any driver in the middle of an operation: a request
//     names a new version, and the suite does not answer the fetch. So it checks slots,
//     cancels, drain, slow reads and fencing, with no hook in the driver. It answers fetches
//     itself, as bus.FetchServer would not send a wrong nonce.
//   - It holds every frame, session and claim of a run against what the contract says of
//     all of them: ids, provider ids, secrets in texts, one result.
//   - Plain drivers are bound by the operations' clauses, by the messages' but for ENV-6 and
//     ENV-7, and by SUBJECT-3. They are not bound by those on sessions, claims, slots and
//     kept results.
//   - It resizes a node group within its bounds, and deletes what it did not find there.
//     Several resizes start from the same size, of which one may succeed. It stops the driver
//     to see that the cloud keeps the group. No bus shows that the Node of an instance has
//     its id, nor that an instance stays listed while it is deleted.
//   - It proves itself on a driver without the SDK that passes, plain and full, with nothing
//     skipped that binds it. The same driver with one fault at a time must fail the clause of
//     that fault. A test checks that no clause that binds drivers is without a fault, and
//     another that each clause of the contract has a check.
package drivertest
