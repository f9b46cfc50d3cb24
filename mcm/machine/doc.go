// Package machine takes a Machine object through its life: it has an instance
// made for it, follows the Node that joins from it, and has both removed.
//
// Each file holds one step of that life. The steps of a pass run in order until
// one has to wait; a step looks only at typed state, never at texts, and what it
// cannot do at once it leaves to the dispatcher, whose notice starts the next
// pass. No step blocks. Two files hold no step but what bounds them all: replace.go
// how many unhealthy machines are given up at a time, and freezer.go that none is
// while the API servers cannot be read.
//
// Which driver replica does an operation, and what happens when one dies, is not
// decided here but in package dispatch, and how a Node is emptied in package drain; sets and deployments of machines have
// packages of their own.
package machine
