package external_test

import (
	"context"
	"flag"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/machinebus/machinebus/driversdk"
	"github.com/machinebus/machinebus/driversdk/external"
)

// The whole main of a provider of 2018. What changed there is the import.
func ExampleServe() { //nolint:testableexamples // it serves until it gets a stop signal
	cfg := driversdk.Config{Provider: "shelf", Version: "2.0.0"}
	cfg.RegisterFlags(flag.CommandLine)
	driversdk.ParseFlags()

	shelf := &provider{cloud: newCloud()}
	driver := external.New(external.ClassType{APIVersion: "machine.sapcloud.io/v1alpha1", Kind: "ShelfMachineClass"}, shelf)
	shelf.MachineClassDataProvider = driver

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := external.Serve(ctx, cfg, driver)
	stop()
	if err != nil {
		slog.Error("driver stopped", "err", err)
		os.Exit(1)
	}
}
