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
		c = c.with(m)
	}

	return c
}

// with counts one machine more.
func (c counts) with(m *v1alpha1.Machine) counts {
	switch {
	case !m.DeletionTimestamp.IsZero():
		c.Terminating++
	case available(m):
		c.Available++
		c.Active++
	default:
		c.Active++
	}

	return c
}

// unmarked is countsOf for when the set hears of the cluster-autoscaler's last
// change of replicas: those for which it has only machines that it then deletes
// are taken from it, or it would make others for them.
func (p *pass) unmarked(set *v1alpha1.MachineSet) counts {
	c := counts{Replicas: set.Spec.Replicas}
	var marked int32
	for _, m := range p.machines[set.UID] {
		if p.marked(m) {
			marked++
		} else {
			c = c.with(m)
		}
	}
	surplus := max(0, c.Active+marked-c.Replicas) // that the set deletes in any case, marked ones first
	c.Replicas -= min(c.Replicas, max(0, marked-surplus))
	c.Terminating += marked

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
