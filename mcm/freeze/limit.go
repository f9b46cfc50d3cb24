package freeze

import (
	"fmt"

	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// limits are the numbers of machines at which a set is frozen and thawed.
type limits struct {
	freeze, thaw int
}

// of returns the limits of a set; deployment is nil if it has none.
func (s Settings) of(set *v1alpha1.MachineSet, deployment *v1alpha1.MachineDeployment) (limits, error) {
	most := 2 * int(set.Spec.Replicas)
	if deployment != nil {
		surge, err := surgeOf(deployment)
		if err != nil {
			return limits{}, err
		}
		most = int(deployment.Spec.Replicas) + surge
	}

	return limits{freeze: most + s.Up, thaw: most + s.Up - s.Down}, nil
}

// surgeOf returns how many machines beyond its replicas a deployment's strategy
// allows. One that recreates its machines allows none.
func surgeOf(deployment *v1alpha1.MachineDeployment) (int, error) {
	var surge *intstr.IntOrString
	switch strategy := deployment.Spec.Strategy; {
	case strategy.Type == v1alpha1.RollingUpdateMachineDeploymentStrategyType && strategy.RollingUpdate != nil:
		surge = strategy.RollingUpdate.MaxSurge
	case strategy.Type == v1alpha1.InPlaceUpdateMachineDeploymentStrategyType && strategy.InPlaceUpdate != nil:
		surge = strategy.InPlaceUpdate.MaxSurge
	}
	if surge == nil {
		return 0, nil
	}
	n, err := intstr.GetScaledValueFromIntOrPercent(surge, int(deployment.Spec.Replicas), true)
	if err != nil {
		return 0, fmt.Errorf("maxSurge of machine deployment %s/%s: %w", deployment.Namespace, deployment.Name, err)
	}

	return n, nil
}

// frozen tells what a set with that many machines is to be. Between the limits
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
