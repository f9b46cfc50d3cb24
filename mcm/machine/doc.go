// Package machine takes a Machine object through its life. It has an instance made for
// it, follows the Node that joins from it, and has both removed.
//
// A pass ties together one type for each part of that life: its class, its operations at
// the driver, creation, health, preservation, deletion. Each type has the fields that its
// steps need.
//
// Its rules:
//
//   - The steps of a pass run in order until one has to wait. No step blocks: the event
//     that it waits for, such as the dispatcher's notice, starts the next pass.
//   - A step looks only at typed state, never at texts.
//   - An operation is journaled before it is first sent, and settled in the write that
//     stores its outcome.
//   - Only a few unhealthy machines of a pool are given up at a time, and none while an API
//     server cannot be read.
//
// Package dispatch chooses the driver replica for an operation, and goes on when one dies.
// Package drain empties Nodes. Sets and deployments of machines have packages of their own.
// README.md has the details of deletion, health, preservation and machines from other
// managers.
package machine
