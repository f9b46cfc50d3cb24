// Command mcm-autoscaler lets the stock cluster-autoscaler scale MachineDeployments:
// it is what --cloud-provider=externalgrpc talks to. Package mcm/autoscaler gives the
// answers; this one wires flags to it and guards the door.
package main

import (
	"fmt"
	"os"

	ctrl "sigs.k8s.io/controller-runtime"
)

func main() {
	if err := newCommand().ExecuteContext(ctrl.SetupSignalHandler()); err != nil {
		fmt.Fprintln(os.Stderr, "mcm-autoscaler: "+err.Error())
		os.Exit(1)
	}
}
