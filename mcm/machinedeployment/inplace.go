package machinedeployment

import (
	"context"
	"fmt"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// EventInPlaceUpdateHeld is the reason of the Event on a deployment whose new
// template waits because nothing here updates machines in place.
const EventInPlaceUpdateHeld = "InPlaceUpdateHeld"

// holdInPlaceUpdate keeps a deployment with the strategy InPlaceUpdate at its replicas, but
// leaves machines of an earlier template alone: to replace them would be what its
// owner chose to avoid.
func (r *rollout) holdInPlaceUpdate(ctx context.Context) error {
	if total(r.countsOfAll(r.old), counts.most) == 0 {
		return r.recreateMachines(ctx)
	}
	r.progress.fault = fmt.Sprintf("Updates in place are not supported: %d machine sets keep their earlier template; "+
		"choose the strategy RollingUpdate, or go back to their template", len(r.old))
	if current := conditionOf(&r.deployment.Status, v1alpha1.MachineDeploymentProgressing); current == nil || current.Message != r.progress.fault {
		r.warnf(EventInPlaceUpdateHeld, "%s", r.progress.fault)
	}

	return nil
}
