package machinedeployment

import (
	"context"
	"fmt"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// EventInPlaceUpdateHeld is the reason of the Event on a deployment whose new
// template waits because nothing here updates machines in place.
const EventInPlaceUpdateHeld = "InPlaceUpdateHeld"

// inPlace keeps a deployment with the strategy InPlaceUpdate at its replicas, but
// leaves machines of an earlier template alone: to replace them would be what its
// owner chose to avoid.
func (p *pass) inPlace(ctx context.Context) error {
	if total(p.countsOfAll(p.old), counts.most) == 0 {
		return p.recreate(ctx)
	}
	p.fault = fmt.Sprintf("Updates in place are not supported: %d machine sets keep their earlier template; "+
		"choose the strategy RollingUpdate, or go back to their template", len(p.old))
	if current := conditionOf(&p.deployment.Status, v1alpha1.MachineDeploymentProgressing); current == nil || current.Message != p.fault {
		p.warnf(EventInPlaceUpdateHeld, "%s", p.fault)
	}

	return nil
}
