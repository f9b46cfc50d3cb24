package v1alpha1

import (
	"k8s.io/apimachinery/pkg/util/intstr"
)

// mostReplicas bounds numbers that are summed up: far more machines than anybody
// has, and far fewer than int32 holds.
const mostReplicas = 1 << 24

// UpdateLimits returns how many machines there may be beyond the replicas, and
// how many may be unavailable, while the deployment is updated. A percentage of
// maxSurge is rounded up, one of maxUnavailable down; when both come to nothing,
// one machine may be unavailable, since nothing could ever move otherwise. With
// the strategy Recreate there may be none of either. What is missing, or is no
// number, counts as 0.
func (s *MachineDeploymentSpec) UpdateLimits() (surge, unavailable int32) {
	var c UpdateConfiguration
	switch strategy := s.Strategy; {
	case strategy.RollingUpdate != nil && strategy.Type == RollingUpdateMachineDeploymentStrategyType:
		c = strategy.RollingUpdate.UpdateConfiguration
	case strategy.InPlaceUpdate != nil && strategy.Type == InPlaceUpdateMachineDeploymentStrategyType:
		c = strategy.InPlaceUpdate.UpdateConfiguration
	default:
		return 0, 0
	}
	surge, unavailable = scaled(c.MaxSurge, s.Replicas, true), scaled(c.MaxUnavailable, s.Replicas, false)
	if surge == 0 && unavailable == 0 {
		unavailable = 1
	}

	return surge, min(unavailable, s.Replicas)
}

func scaled(value *intstr.IntOrString, replicas int32, up bool) int32 {
	if value == nil {
		return 0
	}
	n, err := intstr.GetScaledValueFromIntOrPercent(value, int(replicas), up)
	if err != nil {
		return 0
	}

	return int32(max(0, min(n, mostReplicas)))
}
