package machinedeployment

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// stillAfter is how long a machine that does not fail may do the same before it
// counts as one that holds the deployment up: waiting for a driver, for one.
const stillAfter = time.Minute

// describeHoldups says which machines keep the deployment from its goal and why, as text for a condition; empty when there are none. It names one machine:
// the one that has been in its way longest.
func (p *progress) describeHoldups() string {
	var found []*v1alpha1.Machine
	for _, set := range p.sets {
		for _, m := range p.machines[set.UID] {
			if !available(m) && (set == p.latest || lost(m)) && p.holdsUp(m) {
				found = append(found, m)
			}
		}
	}
	if len(found) == 0 {
		return ""
	}
	// By age, so that the text stays the same while one after the other fails again.
	first := slices.MinFunc(found, func(a, b *v1alpha1.Machine) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	phase := first.Status.CurrentStatus.Phase
	if phase == "" {
		phase = "new"
	}
	text := fmt.Sprintf("Machine %s (%s)", first.Name, phase)
	last := first.Status.LastOperation
	if last.ErrorCode != "" {
		text += ": " + last.ErrorCode
	}
	if last.Description != "" {
		text += ": " + v1alpha1.ShortText(last.Description)
	}
	if len(found) > 1 {
		text = fmt.Sprintf("%d machines hold it up. %s", len(found), text)
	}

	return text
}

func (p *progress) holdsUp(m *v1alpha1.Machine) bool {
	switch m.Status.CurrentStatus.Phase {
	case v1alpha1.MachineCrashLoopBackOff, v1alpha1.MachineFailed, v1alpha1.MachineUnknown:
		return true
	default:
	}
	if m.Status.LastOperation.State == v1alpha1.MachineStateFailed {
		return true
	}
	since := m.Status.LastOperation.LastUpdateTime.Time
	if since.IsZero() {
		since = m.CreationTimestamp.Time
	}
	left := stillAfter - p.now.Sub(since)
	if left > 0 {
		p.LookAgain(left)
	}

	return left <= 0
}
