// Package caller is the asking side of operations: [Caller.Call] has one operation done by a
// driver replica and returns its outcome, whatever dies meanwhile.
//
// Its rules:
//
//   - A read is asked again when an answer is lost.
//   - A mutation is done once. The claim on its machine, which the operations stream of the
//     provider holds, decides about each further attempt. A session is only a hint of who
//     lives and who has room.
//   - After a known failure the caller ends. After an unknown one the same operation goes on.
//   - A driver without sessions gets work only while no full replica of the provider lives.
//
// The package begins nothing by itself and knows no Kubernetes object. The answering side is
// package replica. bus/OPERATIONS.md says what happens to an operation, bus/STREAMS.md how the
// stream is kept, and bus/SAFETY.md why both sides together never do a mutation twice.
package caller
