// Package bridge serves the gRPC protocol of 2018 to drivers that were written for it, and makes
// each of them a replica on the bus. A driver opens a stream by Register and says which kind of
// class it serves. From then on the stream is an external.ExternalDriverProvider, whose calls are
// messages on it.
//
// The package is the stream and the two unary calls. What a provider of 2018 may know, and how its
// errors become codes, is in driversdk/external; claims, sessions and drain are in driversdk.
//
// Its rules:
//
//   - One goroutine sends on a stream, and one receives. A request is noted before it is sent, and
//     ends with its answer, with its deadline or with the stream.
//   - A stream that breaks the protocol, or does not answer in time, ends. That ends its replica,
//     and nothing else.
//   - When a stream ends in the middle of a create or a delete, the outcome is unknown. The manager
//     goes on with another replica.
//   - GetMachineClass and GetSecret answer for the operations that run on streams of the same
//     connection. For anything else the answer is an error, which does not depend on whether the
//     object exists.
package bridge
