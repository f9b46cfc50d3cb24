package main

import (
	"fmt"
	"os"

	"github.com/gardener/machine-controller-manager/pkg/util/provider/app"
	"github.com/gardener/machine-controller-manager/pkg/util/provider/app/options"
	"github.com/spf13/pflag"

	"github.com/machinebus/machinebus/driversdk/mcmdriver/sample/provider"
)

func main() {
	s := options.NewMCServer()
	s.AddFlags(pflag.CommandLine)
	pflag.Parse()
	if err := app.Run(s, provider.New()); err != nil {
		fmt.Fprintf(os.Stderr, "%v\n", err)
		os.Exit(1)
	}
}
