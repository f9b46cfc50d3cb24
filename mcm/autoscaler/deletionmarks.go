package autoscaler

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// Marks is the format in which a deployment's annotation names the machines to delete.
type Marks string

// The formats.
const (
	// MarksWithTime has names with times, for this project's controllers and machine
	// controller managers since v0.61.3. It is the default.
	MarksWithTime Marks = "annotation"
	// MarksByName has names only, for machine controller managers since v0.56.
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

// markedMachines returns the machines that a deployment names for deletion.
func markedMachines(d *v1alpha1.MachineDeployment) []string {
	var names []string
	for entry := range strings.SplitSeq(d.Annotations[v1alpha1.AnnotationKeyTriggerDeletion], ",") {
		if name, _, _ := strings.Cut(strings.TrimSpace(entry), "~"); name != "" {
			names = append(names, name)
		}
	}

	return names
}

// mark adds machines to those that the deployment names for deletion. The time in the second
// annotation ties them to the replicas of this update, so each update has its own time.
// Otherwise a set with the replicas of one update would delete machines that the next one
// marks, and create others in their place.
func (s *Server) mark(d *v1alpha1.MachineDeployment, machines []string) {
	now := s.cfg.Now().UTC()
	last, err := time.Parse(time.RFC3339, d.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler])
	if err == nil && !now.After(last) { // another replica's clock may be ahead
		now = last.UTC().Add(time.Nanosecond)
	}
	stamp := now.Format(time.RFC3339Nano)
	var entries []string
	if before := d.Annotations[v1alpha1.AnnotationKeyTriggerDeletion]; before != "" {
		entries = strings.Split(before, ",")
	}
	for _, name := range slices.Sorted(slices.Values(machines)) {
		if s.cfg.Marks != MarksByName {
			name += "~" + stamp
		}
		entries = append(entries, name)
	}
	if d.Annotations == nil {
		d.Annotations = map[string]string{}
	}
	d.Annotations[v1alpha1.AnnotationKeyTriggerDeletion] = strings.Join(entries, ",")
	d.Annotations[v1alpha1.AnnotationKeyLastReplicaChangeByScaler] = stamp
}
