// Driver-conformance checks a driver over the bus, clause by clause, against the
// contract in proto/machinebus/driver/v1. Package driversdk/drivertest is the suite;
// this program provides a bus, a class and a driver process.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// Exit codes.
const (
	exitBroken  = 1 // the driver breaks the contract, or instances were left
	exitUnknown = 2 // the driver could not be checked
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal kills
	err := newCommand().ExecuteContext(ctx)
	stop()
	switch {
	case errors.Is(err, errBroken):
		os.Exit(exitBroken)
	case err != nil:
		fmt.Fprintln(os.Stderr, "driver-conformance:", err)
		os.Exit(exitUnknown)
	}
}
