// The sample is a driver for virtual clouds that knows the machine controller manager's
// interface only. It shows what becomes of a main, and its tests run it as a process.
package main

import (
	"github.com/machinebus/machinebus/driversdk"
	"github.com/machinebus/machinebus/driversdk/mcmdriver"
	"github.com/machinebus/machinebus/driversdk/mcmdriver/sample/provider"
)

func main() {
	mcmdriver.Main(provider.New(), driversdk.Config{Provider: provider.Name, Version: "1.0.0"})
}
