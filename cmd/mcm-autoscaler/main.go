// Command mcm-autoscaler lets the stock cluster-autoscaler scale MachineDeployments
// with --cloud-provider=externalgrpc. Package mcm/autoscaler answers the calls; this
// package wires flags to it and sets up TLS.
package main

import (
	"fmt"
	"os"
	"runtime"

	ctrl "sigs.k8s.io/controller-runtime"
)

func main() {
	// A loop of the cluster-autoscaler makes thousands of calls one after the other, each
	// answered from memory in microseconds. On several processors most of that time is
	// one waking the other. The environment variable GOMAXPROCS takes precedence.
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(1)
	}
	if err := newCommand().ExecuteContext(ctrl.SetupSignalHandler()); err != nil {
		fmt.Fprintln(os.Stderr, "mcm-autoscaler: "+err.Error())
		os.Exit(1)
	}
}
