// Mcmctl shows what happens on the bus: which driver replicas live, which
// operations they run, and what the messages say. Nothing it does changes a machine;
// but for turning old classes into new ones it only listens and needs no Kubernetes
// cluster. What machines are there and why they wait is told by kubectl.
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
