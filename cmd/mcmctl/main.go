// Mcmctl shows what happens on the bus: driver replicas, their operations, and
// messages. It changes nothing on the bus; migrate asks a driver to convert a class.
// Its rollout commands do for machine deployments what kubectl rollout does for
// Deployments of pods. kubectl shows machines and why they wait. Its command new writes the
// code of a new driver.
package main

import (
	"fmt"
	"os"
)

func main() {
	if err := newRoot().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "mcmctl:", err)
		os.Exit(1)
	}
}
