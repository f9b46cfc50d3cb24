// Package machine takes a Machine object through its life. It has an instance made for
// it, follows the Node that joins from it, and has both removed.
//
// A pass (pass.go) ties together one type for each part of that life: its class, its
// operations at the driver, creation, health, preservation, deletion. Each type has the
// fields that its steps need. The steps of a pass run in order until one has to wait. A
// step looks only at typed state, never at texts. No step blocks: the dispatcher's notice
// starts the next pass.
//
// Two parts bound what all passes may do. replacementbudget.go limits how many unhealthy
// machines are given up at a time. outageguard.go keeps all of them while the API servers
// cannot be read.
//
// Package dispatch chooses the driver replica for an operation, and goes on when one dies.
// Package drain empties Nodes. Sets and deployments of machines have packages of their own.
package machine
