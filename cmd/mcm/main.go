// Command mcm is the machine controller manager: it turns Machine objects into
// instances through the drivers on the bus. This package only wires flags to
// packages; run.go shows how they fit together.
package main

import (
	"fmt"
	"os"

	ctrl "sigs.k8s.io/controller-runtime"
)

func main() {
	if err := newCommand().ExecuteContext(ctrl.SetupSignalHandler()); err != nil {
		fmt.Fprintln(os.Stderr, "mcm: "+err.Error())
		os.Exit(1)
	}
}
