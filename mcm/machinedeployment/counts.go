package machinedeployment

import (
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// counts are a set as a plan sees it.
type counts struct {
	Replicas    int32 // of its spec
	Active      int32 // machines that are not being deleted
	Available   int32 // of them
	Terminating int32 // machines that are being deleted
}

// most is how many machines the set may come to have before its replicas change again.
func (c counts) most() int32 { return max(c.Replicas, c.Active) + c.Terminating }

// sure is how many machines are still available once the set has deleted those
// that it has too many of. Which these are is the set's decision.
func (c counts) sure() int32 {
	return max(0, c.Available-max(0, c.Active-c.Replicas))
}

// broken is how many of the set's replicas are unavailable, whatever it has yet
// to delete.
func (c counts) broken() int32 { return max(0, c.Replicas-c.Available) }

func total(all []counts, of func(counts) int32) int32 {
	var sum int32
	for _, c := range all {
		sum += of(c)
	}

	return sum
}

func replicasOf(c counts) int32 { return c.Replicas }

// limits are how many machines there may be beyond the replicas, and how many
// may be unavailable, in a rollout.
type limits struct{ surge, unavailable int32 }

// limitsOf returns the limits of a spec.
func limitsOf(spec *v1alpha1.MachineDeploymentSpec) limits {
	surge, unavailable := spec.UpdateLimits()

	return limits{surge: surge, unavailable: unavailable}
}

// countsOf sums up a set as plans see it.
func (o *ownedSets) countsOf(set *v1alpha1.MachineSet) counts {
	c := counts{Replicas: set.Spec.Replicas}
	for _, m := range o.machines[set.UID] {
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

// countsWithoutMarked is countsOf for when the set hears of the cluster-autoscaler's last
// change of replicas: those for which it has only machines that it then deletes
// are taken from it, or it would make others for them.
func (o *ownedSets) countsWithoutMarked(set *v1alpha1.MachineSet) counts {
	c := counts{Replicas: set.Spec.Replicas}
	var marked int32
	for _, m := range o.machines[set.UID] {
		if o.isMarked(m) {
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

func (o *ownedSets) countsOfAll(sets []*v1alpha1.MachineSet) []counts {
	all := make([]counts, len(sets))
	for i, set := range sets {
		all[i] = o.countsOf(set)
	}

	return all
}

// available reports whether work can be put on a machine.
func available(m *v1alpha1.Machine) bool {
	phase := m.Status.CurrentStatus.Phase

	return m.DeletionTimestamp.IsZero() && (phase == v1alpha1.MachineRunning || phase == v1alpha1.MachineAvailable)
}
