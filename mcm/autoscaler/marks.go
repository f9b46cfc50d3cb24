package autoscaler

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// Marks is how a deployment names the machines that have to go.
type Marks string

// The ways.
const (
	// MarksWithTime names machines with the time: what this project's controllers
	// and machine controller managers since v0.61.3 read. The default.
	MarksWithTime Marks = "annotation"
	// MarksByName gives names alone: for machine controller managers since v0.56.
	MarksByName Marks = "annotation-names"
)

// UnmarshalText sets a Marks from a flag's value.
func (m *Marks) UnmarshalText(text []byte) error {
	switch v := Marks(text); v {
	case MarksWithTime, MarksByName:
		*m = v

		return nil
	default:
		return fmt.Errorf("%q: want %s or %s", text, MarksWithTime, MarksByName)
	}
}

// MarshalText is the inverse of UnmarshalText.
func (m Marks) MarshalText() ([]byte, error) { return []byte(m), nil }

// ahead is how far times may run ahead of the clock, with many updates in a second
// or a clock that was set back. One that is further ahead is somebody's mistake.
const ahead = time.Hour

// markedMachines are those that a deployment names.
func markedMachines(d *v1alpha1.MachineDeployment) []string {
	var names []string
	for entry := range strings.SplitSeq(d.Annotations[v1alpha1.AnnotationKeyTriggerDeletion], ",") {
		if name, _, _ := strings.Cut(strings.TrimSpace(entry), "~"); name != "" {
			names = append(names, name)
		}
	}

	return names
}

// mark names machines to be deleted, beside those that are named already. The
// time in the second annotation is what ties them to the replicas of this very
// update. It is later than that of the update before: a set that has heard of that
// one only would delete these machines, too, and make others for them.
func (s *Server) mark(d *v1alpha1.MachineDeployment, machines []string) {
	at := s.cfg.Now().UTC().Truncate(time.Second)
	last, err := time.Parse(time.RFC3339, d.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler])
	if err == nil && !at.After(last) && last.Sub(at) < ahead {
		at = last.UTC().Truncate(time.Second).Add(time.Second)
	}
	now := at.Format(time.RFC3339)
	var entries []string
	if before := d.Annotations[v1alpha1.AnnotationKeyTriggerDeletion]; before != "" {
		entries = strings.Split(before, ",")
	}
	for _, name := range slices.Sorted(slices.Values(machines)) {
		if s.cfg.Marks != MarksByName {
			name += "~" + now
		}
		entries = append(entries, name)
	}
	if d.Annotations == nil {
		d.Annotations = map[string]string{}
	}
	d.Annotations[v1alpha1.AnnotationKeyTriggerDeletion] = strings.Join(entries, ",")
	d.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler] = now
}
