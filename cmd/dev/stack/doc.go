// Package stack runs machinebus as its users do: the built programs as processes, on
// free loopback ports, with their logs in a folder. The demo and the end-to-end tests
// use it.
//
// A [Site] starts processes and ends them all when it is closed. StartDevCluster,
// StartCloud, StartManager, StartDriver and StartNATS know each program's flags and when
// it is ready. [NewClient] reads the API server, and [Tap] listens to the bus.
//
// The package is not a supervisor: it restarts nothing by itself, and a process that
// exits is an error for callers that wait for it. It contains no fakes and no code of
// the programs.
package stack
