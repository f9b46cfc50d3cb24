package main

import (
	"context"
	"log/slog"

	"github.com/machinebus/machinebus/cmd/driver-virtual/virtual"
	"github.com/machinebus/machinebus/cmd/internal/tracing"
	"github.com/machinebus/machinebus/driversdk"
)

// serve serves the driver, and its node groups if there are any. The SDK creates
// traces; the program sends them.
func serve(ctx context.Context, cfg driversdk.Config, driver *virtual.Driver, groups *pools) error {
	stop, err := tracing.Start(ctx, "driver-virtual", cfg.Version, func(err error) { slog.Error("spans not sent", "err", err) })
	if err != nil {
		return err
	}
	defer stop()
	pooled, err := groups.driver(ctx, driver)
	if err != nil {
		return err
	}
	if pooled != nil {
		return driversdk.Serve(ctx, cfg, *pooled)
	}

	return driversdk.Serve(ctx, cfg, driver)
}
