// Command mcm-autoscaler lets the stock cluster-autoscaler scale MachineDeployments:
// it is what --cloud-provider=externalgrpc talks to. Package mcm/autoscaler gives the
// answers; this one wires flags to it and guards the door.
package main

import (
	"fmt"
	"os"
	"runtime"

	ctrl "sigs.k8s.io/controller-runtime"
)

func main() {
	// A loop of the cluster-autoscaler is thousands of calls, one after the other, each
	// answered from memory in microseconds: on several processors most of a call is one
	// waking the other. The environment variable GOMAXPROCS wins.
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(1)
	}
	if err := newCommand().ExecuteContext(ctrl.SetupSignalHandler()); err != nil {
		fmt.Fprintln(os.Stderr, "mcm-autoscaler: "+err.Error())
		os.Exit(1)
	}
}
