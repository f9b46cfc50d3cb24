// Package caller is the asking side of operations: [Caller.Call] runs one operation at a
// driver replica and returns its outcome, whichever replica dies.
//
// Its rules:
//
//   - A read is retried when an answer is lost.
//   - A mutation takes effect once. The claim on its machine, in the provider's operations
//     stream, decides about each further attempt. A session is only a hint of which replica
//     lives and has room.
//   - A known failure ends the operation. After an unknown one the same operation goes on.
//   - A driver without sessions gets work only while no full replica of the provider lives.
//
// The package begins nothing by itself and knows no Kubernetes object. The answering side is
// package replica. bus/OPERATIONS.md says what happens to an operation, bus/STREAMS.md how the
// stream is kept, and bus/SAFETY.md why both sides together never do a mutation twice.
package caller
