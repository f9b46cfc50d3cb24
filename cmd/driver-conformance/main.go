// Driver-conformance checks a driver against the contract in
// proto/machinebus/driver/v1, over the bus, clause by clause. Package
// driversdk/drivertest is the suite; this program gives it a bus, a class and a
// driver process.
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
	exitBroken  = 1 // the driver breaks the contract, or something was left behind
	exitUnknown = 2 // it could not be checked
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
