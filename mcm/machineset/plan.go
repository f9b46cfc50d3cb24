package machineset

import (
	"slices"
	"time"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// burst is how many machines one pass creates or deletes at most.
const burst = 100

// A plan is what one pass does.
type plan struct {
	delete []*v1alpha1.Machine
	create int
	// preserve says that the choice of Failed machines to preserve has changed.
	preserve bool
	// recheck is when a machine's preservation ends; zero for never.
	recheck time.Time
}

func (p *plan) nothing() bool { return len(p.delete) == 0 && p.create == 0 && !p.preserve }

// planFor says what brings a set with these machines to its replicas.
func planFor(set *v1alpha1.MachineSet, machines []*v1alpha1.Machine, now time.Time) *plan {
	var p plan
	var active, dispensable []*v1alpha1.Machine
	keep, letGo := choosePreserved(set, machines, now)
	p.preserve = len(keep)+len(letGo) > 0
	for _, m := range machines {
		switch {
		case leaving(m):
			continue
		case discarded(set, m, now) && !slices.Contains(keep, m):
			p.delete = append(p.delete, m)

			continue
		}
		active = append(active, m)
		// One that was updated in place moves to the new set and is not surplus.
		if m.Labels[v1alpha1.LabelKeyNodeUpdateResult] != v1alpha1.LabelValueUpdateSuccessful {
			dispensable = append(dispensable, m)
		}
		p.recheckAt(m, now)
	}
	replicas := int(set.Spec.Replicas)
	switch {
	case len(active) < replicas && mayGrow(set):
		p.create = min(replicas-len(active), burst)
	case len(dispensable) > replicas:
		slices.SortFunc(dispensable, func(a, b *v1alpha1.Machine) int { return deletedBefore(a, b, now) })
		p.delete = append(p.delete, dispensable[:len(dispensable)-replicas]...)
	}
	p.delete = p.delete[:min(len(p.delete), burst)]

	return &p
}

// mayGrow reports whether nothing keeps the set from making machines.
func mayGrow(set *v1alpha1.MachineSet) bool {
	_, disabled := set.Labels[v1alpha1.LabelKeyScaleUpDisabled]

	return !disabled && set.Labels[v1alpha1.LabelKeyFreeze] != v1alpha1.LabelValueTrue
}

// recheckAt notes when a Failed machine is to be looked at again although nothing
// happens to it.
func (p *plan) recheckAt(m *v1alpha1.Machine, now time.Time) {
	if m.Status.CurrentStatus.Phase != v1alpha1.MachineFailed || !preserved(m, now) {
		return
	}
	if until := m.Status.CurrentStatus.PreserveExpiryTime.Time; p.recheck.IsZero() || until.Before(p.recheck) {
		p.recheck = until
	}
}
