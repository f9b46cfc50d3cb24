// Package dispatch hands machine operations to the drivers on the bus and never
// makes a reconciler wait: Start returns at once with what is known of the
// operation, and a notice follows whenever that changes.
//
// It also translates between the API's objects and the wire's messages, and says
// on the bus who leads and what came of each operation. It decides nothing about
// machines: what to do next, and when to try again after a driver's error, is for
// the controllers. Together with package fetch it is the only part of mcm that
// sees the bus. README.md has the rules of its queue, and names what it publishes.
package dispatch
