package overshoot

import "github.com/machinebus/machinebus/mcm/api/v1alpha1"

// limits are the numbers of machines at which a freeze begins and ends.
type limits struct {
	freeze, thaw int
}

// limitsOf returns the limits of a set; deployment is nil if it has none.
func (s Settings) limitsOf(set *v1alpha1.MachineSet, deployment *v1alpha1.MachineDeployment) limits {
	most := 2 * int(set.Spec.Replicas)
	if deployment != nil {
		surge, _ := deployment.Spec.UpdateLimits()
		most = int(deployment.Spec.Replicas + surge)
	}

	return limits{freeze: most + s.Up, thaw: most + s.Up - s.Down}
}

// frozen reports whether a set with that many machines is to be frozen. Between the limits
// it stays what it is.
func (l limits) frozen(machines int, is bool) bool {
	switch {
	case machines >= l.freeze:
		return true
	case machines <= l.thaw:
		return false
	default:
		return is
	}
}
