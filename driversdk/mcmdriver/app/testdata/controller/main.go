// The main of a driver as the machine controller manager's projects write it. Nothing here is of this project.
package main

import (
	"fmt"
	"os"

	"github.com/gardener/machine-controller-manager/pkg/util/provider/app"
	"github.com/gardener/machine-controller-manager/pkg/util/provider/app/options"
	"github.com/gardener/machine-controller-manager/pkg/util/provider/driver"
	"github.com/spf13/pflag"
)

func main() {
	s := options.NewMCServer()
	s.AddFlags(pflag.CommandLine)
	pflag.Parse()

	if err := app.Run(s, driver.NewFakeDriver(false, "fake:///i-1", "node-1", "", nil, nil, nil)); err != nil {
		fmt.Fprintf(os.Stderr, "%v\n", err)
		os.Exit(1)
	}
}
