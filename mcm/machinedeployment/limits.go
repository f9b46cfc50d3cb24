package machinedeployment

import (
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// limits are how many machines there may be beyond the replicas, and how many
// may be unavailable, in a rollout.
type limits struct{ surge, unavailable int32 }

// limitsOf returns the limits of a spec.
func limitsOf(spec *v1alpha1.MachineDeploymentSpec) limits {
	surge, unavailable := spec.UpdateLimits()

	return limits{surge: surge, unavailable: unavailable}
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
