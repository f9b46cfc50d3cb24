// Package drain empties Nodes before their instances go, and never makes a
// reconciler wait for it: Start returns at once with what is known of the drain,
// and a notice follows whenever there is something to do.
//
// What is evicted, and how, is decided by the package behind kubectl drain. This
// one adds patience (a budget's refusals, deadlines, a limit on requests), force,
// and an end to all of it when the machine's deletion takes another turn. When to
// drain and what to do afterwards is for the machine controller.
package drain
