// Package app stands in for the package of this name of the machine controller manager, in
// whose Run the main of each of its drivers ends. A build that puts this file in the place
// of that package's makes a driver of the bus from an unchanged provider: README.md of
// mcmdriver has the command.
package app

import (
	"github.com/gardener/machine-controller-manager/pkg/util/provider/app/options"
	"github.com/gardener/machine-controller-manager/pkg/util/provider/driver"

	"github.com/machinebus/machinebus/driversdk/mcmdriver"
)

// Run serves d until an interrupt or SIGTERM. The options are those of a controller, which
// runs elsewhere: the driver takes its own from the environment.
func Run(_ *options.MCServer, d driver.Driver) error { return mcmdriver.ServeFromEnvironment(d) }
