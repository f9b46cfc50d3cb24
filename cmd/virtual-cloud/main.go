// Command virtual-cloud is an HTTP cloud for development and tests. Its instances exist
// only in memory, and can join a Kubernetes cluster as Nodes. Its knobs make it as slow,
// full and faulty as real clouds are, and its log records what really happened.
//
// It is not for production: an instance runs nothing.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the program at once
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}
