// Package stack runs machinebus as its users run it: the built programs, as
// processes of their own, on free loopback ports, each with its log in a folder.
// The demo and the end-to-end tests are written on top of it.
//
// A [Site] starts processes and, when it is closed, ends every one of them. On
// top of it, StartDevCluster, StartCloud, StartManager, StartDriver and StartNATS
// know each program's flags and when it is ready, and [Kube] and [Tap] show what
// the API server and the bus have to say.
//
// The package is no supervisor: nothing is restarted, and a process that ends by
// itself is an error for whoever waits for it. It contains nothing that a user
// could not type; there are no fakes and no code of the programs in it.
package stack
