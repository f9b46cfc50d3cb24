package machinedeployment

import (
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// limits are how many machines there may be beyond the replicas, and how many
// may be unavailable, in a rollout.
type limits struct{ surge, unavailable int32 }

// limitsOf works out the limits of a spec that was validated. A percentage of the
// surge is rounded up, one of the unavailable down; when both come to nothing, one
// machine may be unavailable, since nothing could ever move otherwise.
func limitsOf(spec *v1alpha1.MachineDeploymentSpec) limits {
	var c v1alpha1.UpdateConfiguration
	switch strategy := spec.Strategy; {
	case strategy.RollingUpdate != nil && strategy.Type == v1alpha1.RollingUpdateMachineDeploymentStrategyType:
		c = strategy.RollingUpdate.UpdateConfiguration
	case strategy.InPlaceUpdate != nil && strategy.Type == v1alpha1.InPlaceUpdateMachineDeploymentStrategyType:
		c = strategy.InPlaceUpdate.UpdateConfiguration
	default:
		return limits{}
	}
	l := limits{surge: scaled(c.MaxSurge, spec.Replicas, true), unavailable: scaled(c.MaxUnavailable, spec.Replicas, false)}
	if l.surge == 0 && l.unavailable == 0 {
		l.unavailable = 1
	}
	l.unavailable = min(l.unavailable, spec.Replicas)

	return l
}

func scaled(value *intstr.IntOrString, replicas int32, up bool) int32 {
	if value == nil {
		return 0
	}
	n, err := intstr.GetScaledValueFromIntOrPercent(value, int(replicas), up)
	if err != nil {
		return 0
	}
	const most = 1 << 24 // far from where sums of int32 overflow

	return int32(max(0, min(n, most)))
}

// countsOf sums up a set as plans see it.
func (p *pass) countsOf(set *v1alpha1.MachineSet) counts {
	c := counts{Replicas: set.Spec.Replicas}
	for _, m := range p.machines[set.UID] {
		switch {
		case !m.DeletionTimestamp.IsZero():
			c.Terminating++
		case available(m):
			c.Available++
			c.Active++
		default:
			c.Active++
		}
	}

	return c
}

func (p *pass) countsOfAll(sets []*v1alpha1.MachineSet) []counts {
	all := make([]counts, len(sets))
	for i, set := range sets {
		all[i] = p.countsOf(set)
	}

	return all
}

// available tells whether work can be put on a machine.
func available(m *v1alpha1.Machine) bool {
	phase := m.Status.CurrentStatus.Phase

	return m.DeletionTimestamp.IsZero() && (phase == v1alpha1.MachineRunning || phase == v1alpha1.MachineAvailable)
}
