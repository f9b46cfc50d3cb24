// Mcmctl shows what happens on the bus: which driver replicas live, which
// operations they run, and what the messages say. It only listens: nothing it does
// changes a machine, and it needs no Kubernetes cluster. What machines are there
// and why they wait is told by kubectl.
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
