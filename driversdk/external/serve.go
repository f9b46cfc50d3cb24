package external

import (
	"cmp"
	"context"

	"github.com/machinebus/machinebus/driversdk"
)

// Serve runs a provider as one replica until ctx ends, as [driversdk.Serve] does. The replica
// announces one slot unless cfg says otherwise, so that mcm spreads operations over replicas
// rather than queue them at this one. It announces no identity of creates, as a provider of 2018
// gets none.
func Serve(ctx context.Context, cfg driversdk.Config, d *Driver) error {
	cfg.Slots = cmp.Or(cfg.Slots, 1)
	cfg.CreateIdentity = driversdk.IdentityNone

	return driversdk.Serve(ctx, cfg, d)
}
