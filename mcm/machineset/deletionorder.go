package machineset

import (
	"cmp"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// phaseOrder says which phase is deleted first when a set shrinks. Phases that
// are not listed come with Terminating. It is the one of the machine controller
// manager, and a promise to its users.
var phaseOrder = map[v1alpha1.MachinePhase]int{
	v1alpha1.MachineTerminating:      0,
	v1alpha1.MachineFailed:           1,
	v1alpha1.MachineCrashLoopBackOff: 2,
	v1alpha1.MachineUnknown:          3,
	v1alpha1.MachinePending:          4,
	v1alpha1.MachineAvailable:        5,
	v1alpha1.MachineRunning:          6,
}

// deletedBefore compares machines by the order in which they are deleted when a
// set shrinks; the one to go first is less. Only the names of two machines made in
// the same second and alike otherwise decide for no other reason than that
// something has to.
func deletedBefore(a, b *v1alpha1.Machine, now time.Time) int {
	return cmp.Or(
		comparePreserved(a, b, now),
		cmp.Compare(priority(a), priority(b)),
		compareMarks(a, b),
		cmp.Compare(phaseOrder[a.Status.CurrentStatus.Phase], phaseOrder[b.Status.CurrentStatus.Phase]),
		a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
		strings.Compare(a.Name, b.Name),
	)
}

// comparePreserved puts preserved machines last: those that no user asked to
// preserve before the others, and then those whose time ends earlier.
func comparePreserved(a, b *v1alpha1.Machine, now time.Time) int {
	if pa, pb := spared(a, now), spared(b, now); !pa || !pb {
		return compareBool(pa, pb)
	}

	return cmp.Or(
		-compareBool(byChoice(a), byChoice(b)),
		compareTimes(a.Status.CurrentStatus.PreserveExpiryTime, b.Status.CurrentStatus.PreserveExpiryTime),
	)
}

// compareTimes puts the earlier time first, and one that is still to be set last.
func compareTimes(a, b *metav1.Time) int {
	if a == nil || b == nil {
		return compareBool(a == nil, b == nil)
	}

	return a.Compare(b.Time)
}

// spared reports whether the machine is preserved, or is about to be.
func spared(m *v1alpha1.Machine, now time.Time) bool {
	return preserved(m, now) || m.Status.CurrentStatus.Phase == v1alpha1.MachineFailed && kept(m, now)
}

// compareMarks puts machines that the autoscaler marked first, the earliest mark
// before the others.
func compareMarks(a, b *v1alpha1.Machine) int {
	ta, marked := markedAt(a)
	tb, other := markedAt(b)
	if marked && other {
		return ta.Compare(tb)
	}

	return -compareBool(marked, other)
}

// compareBool sorts false before true.
func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	default:
		return 1
	}
}

// preserved reports whether the machine is kept although it Failed.
func preserved(m *v1alpha1.Machine, now time.Time) bool {
	until := m.Status.CurrentStatus.PreserveExpiryTime

	return until != nil && until.After(now)
}

// priority is what the machine's annotation says; what is no number counts as
// the default.
func priority(m *v1alpha1.Machine) int {
	if n, err := strconv.Atoi(m.Annotations[v1alpha1.AnnotationKeyMachinePriority]); err == nil {
		return n
	}
	n, _ := strconv.Atoi(v1alpha1.MachinePriorityDefault)

	return n
}

// markedAt is when the autoscaler chose the machine for deletion.
func markedAt(m *v1alpha1.Machine) (time.Time, bool) {
	return timeOf(m.Annotations[v1alpha1.AnnotationKeyMarkedForDeletionTime])
}

func timeOf(text string) (time.Time, bool) {
	t, err := time.Parse(time.RFC3339, text)

	return t, err == nil
}
