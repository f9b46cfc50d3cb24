// Mcm-grpc-bridge lets drivers of the gRPC protocol of 2018 join the bus unchanged: it is the
// server that they dial, and each of them becomes a replica. Package bridge does that; this package
// wires flags to it, and sets up TLS and the health endpoint.
package main

import (
	"context"
	"flag"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/machinebus/machinebus/driversdk"
)

func main() {
	o := newOptions(flag.CommandLine)
	driversdk.ParseFlags()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, o)
	stop()
	if err != nil {
		slog.Error("mcm-grpc-bridge stopped", "err", err)
		os.Exit(1)
	}
}
