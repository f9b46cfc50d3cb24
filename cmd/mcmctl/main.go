// Mcmctl shows what happens on the bus: which driver replicas live, which
// operations they run, and what the messages say. There it only listens, but for
// turning old classes into new ones. Its rollout commands do for machine deployments
// in a control cluster what kubectl rollout does for Deployments of pods. What
// machines are there and why they wait is told by kubectl.
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
