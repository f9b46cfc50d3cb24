package mcmdriver

import (
	"context"
	"encoding/json"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/gardener/machine-controller-manager/pkg/util/provider/driver"

	"github.com/machinebus/machinebus/driversdk"
)

// Serve runs d as one replica until ctx ends, as [driversdk.Serve] does. cfg.Provider is
// the provider as d spells it; the bus has it in lower case.
func Serve(ctx context.Context, d driver.Driver, cfg driversdk.Config) error {
	served := New(d, cfg.Provider)
	cfg.Provider = strings.ToLower(cfg.Provider)

	return driversdk.Serve[json.RawMessage](ctx, cfg, served)
}

func serveUntilSignal(d driver.Driver, cfg driversdk.Config) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM) //nolint:forbidigo // it is a main's
	defer stop()

	return Serve(ctx, d, cfg)
}
