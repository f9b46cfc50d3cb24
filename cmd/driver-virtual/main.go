// Driver-virtual is the reference driver: it creates and deletes the instances of
// virtual-cloud. Package virtual is the driver; this package wires flags to it.
package main

import (
	"context"
	"flag"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/machinebus/machinebus/cmd/driver-virtual/virtual"
	"github.com/machinebus/machinebus/driversdk"
)

func main() {
	cfg := driversdk.Config{Provider: virtual.Provider, Version: "0.1.0", Kind: virtual.Kind, APIVersions: []string{virtual.APIVersion}}
	cfg.RegisterFlags(flag.CommandLine)
	flag.StringVar(&cfg.Provider, "provider", cfg.Provider, "`name` in MachineClass.provider of the classes to serve")
	flag.DurationVar(&cfg.SettleTime, "settle-time", 0, "how long the cloud's list may lag behind; 0 if it never does")
	driver := &virtual.Driver{Identity: driversdk.IdentityToken}
	flag.TextVar(driver, "identity", driver, "how the cloud prevents a second instance of a machine: token, unique_name or none")
	flag.BoolVar(&driver.IgnoreDeadlines, "mock-ignore-deadlines", false, "let creates and deletes ignore their deadlines, for tests")
	var groups pools
	groups.addFlags(flag.CommandLine)
	driversdk.ParseFlags()
	cfg.CreateIdentity = driver.Identity

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := serve(ctx, cfg, driver, &groups)
	stop()
	if err != nil {
		slog.Error("driver-virtual stopped", "err", err)
		os.Exit(1)
	}
}
