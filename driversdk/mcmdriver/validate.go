package mcmdriver

import (
	"context"
	"encoding/json"

	"github.com/machinebus/machinebus/driversdk"
)

// ValidateClass asks the driver for its list: that interface has no call for it, and each
// driver checks class and credentials before it lists.
func (d *Driver) ValidateClass(ctx context.Context, class *driversdk.Class[json.RawMessage]) (warnings []string, err error) {
	_, err = d.List(ctx, class)

	return nil, err
}
