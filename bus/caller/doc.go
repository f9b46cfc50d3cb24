// Package caller is the asking side of operations: [Caller.Call] has one operation done by a
// driver replica and returns its outcome, whatever dies meanwhile.
//
// Reads (read.go) are asked again when an answer is lost. Mutations (mutate.go) must be done
// once: each attempt goes by what the claim on the machine says (consult.go), which the
// operations stream of the provider holds (streams.go). Who lives, and who has room, the
// replicas' sessions say (replicas.go). Drivers without sessions are asked by plain.go.
//
// The package begins nothing by itself and knows no Kubernetes object. The answering side is
// package replica; bus/SAFETY.md argues why both together never do a mutation twice.
package caller
