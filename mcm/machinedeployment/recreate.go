package machinedeployment

import "context"

// recreate deletes all old machines before it makes new ones.
func (p *pass) recreate(ctx context.Context) error {
	if err := p.resizeOld(ctx, make([]int32, len(p.old))); err != nil {
		return err
	}
	if total(p.countsOfAll(p.old), counts.most) > 0 {
		return nil // the end of the last one starts the next pass
	}
	if p.latest == nil {
		return p.begin(ctx, p.deployment.Spec.Replicas)
	}

	return p.resize(ctx, p.latest, p.deployment.Spec.Replicas)
}
