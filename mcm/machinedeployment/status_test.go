package machinedeployment

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestFailedMachinesAreBounded sums up sets that have more to report than one object
// should hold.
func TestFailedMachinesAreBounded(t *testing.T) {
	t.Parallel()
	setWith := func(name string, listed, counted int) *v1alpha1.MachineSet {
		set := &v1alpha1.MachineSet{}
		set.Name, set.Status.FailedMachineCount = name, int32(counted)
		for i := range listed {
			set.Status.FailedMachines = append(set.Status.FailedMachines, v1alpha1.MachineSummary{
				Name: fmt.Sprintf("%s-%03d", name, i), LastOperation: v1alpha1.LastOperation{Description: strings.Repeat("x", 1000)},
			})
		}

		return set
	}
	for name, tc := range map[string]struct {
		reason      string
		old, latest *v1alpha1.MachineSet
		first, last string
		listed      int
		counted     int32
	}{
		"few":  {"all are listed, those of the latest set first", setWith("old", 2, 2), setWith("new", 1, 1), "new-000", "old-001", 3, 3},
		"many": {"what the latest set has to say counts more", setWith("old", 100, 400), setWith("new", 60, 60), "new-000", "old-039", 100, 460},
		"another set controller": {
			"it lists all of them and counts none", setWith("old", 0, 0), setWith("new", 250, 0), "new-000", "new-099", 100, 250,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			text := tc.latest.Status.FailedMachines[0].LastOperation.Description
			p := &ownedSets{
				object: &object{deployment: &v1alpha1.MachineDeployment{}}, sets: []*v1alpha1.MachineSet{tc.old, tc.latest}, latest: tc.latest,
			}
			p.countReplicas()
			s := p.deployment.Status
			if len(s.FailedMachines) != tc.listed || s.FailedMachineCount != tc.counted {
				t.Fatalf("lists %d and counts %d, want %d and %d: %s", len(s.FailedMachines), s.FailedMachineCount, tc.listed, tc.counted, tc.reason)
			}
			if first, last := s.FailedMachines[0].Name, s.FailedMachines[tc.listed-1].Name; first != tc.first || last != tc.last {
				t.Errorf("from %s to %s, want %s to %s: %s", first, last, tc.first, tc.last, tc.reason)
			}
			if n := len(s.FailedMachines[0].LastOperation.Description); n > 600 {
				t.Errorf("a text has %d bytes", n)
			}
			if tc.latest.Status.FailedMachines[0].LastOperation.Description != text {
				t.Error("the cache's set was changed")
			}
		})
	}
}

// TestAvailability is about what machines that are kept for inspection
// count for.
func TestAvailability(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason               string
		available, preserved int32
		want                 string
	}{
		"all":            {"as many as there are to be", 3, 0, "True/MinimumReplicasAvailable"},
		"one fewer":      {"it may be unavailable", 2, 0, "True/MinimumReplicasAvailable"},
		"two fewer":      {"one of them may not", 1, 0, "False/MinimumReplicasUnavailable"},
		"one preserved":  {"a person wants it as it is", 1, 1, "True/MinimumReplicasAvailable"},
		"many preserved": {"no number is below none", 0, 9, "True/MinimumReplicasAvailable"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := &v1alpha1.MachineDeployment{}
			d.Spec.Replicas = 3
			d.Spec.Strategy = v1alpha1.MachineDeploymentStrategy{
				Type: v1alpha1.RollingUpdateMachineDeploymentStrategyType,
				RollingUpdate: &v1alpha1.RollingUpdateMachineDeployment{UpdateConfiguration: v1alpha1.UpdateConfiguration{
					MaxUnavailable: new(intstr.FromInt32(1)), MaxSurge: new(intstr.FromInt32(0)),
				}},
			}
			set := &v1alpha1.MachineSet{}
			set.Status.AvailableReplicas, set.Status.PreservedFailedReplicas = tc.available, tc.preserved
			p := &statusReport{ownedSets: &ownedSets{object: &object{deployment: d}, sets: []*v1alpha1.MachineSet{set}, latest: set}}
			p.countReplicas()
			p.reportAvailability()
			c := conditionOf(&d.Status, v1alpha1.MachineDeploymentAvailable)
			if got := string(c.Status) + "/" + c.Reason; got != tc.want {
				t.Errorf("condition is %s, want %s: %s", got, tc.want, tc.reason)
			}
		})
	}
}

// TestCopyFailure is about which set's failure its deployment reports.
func TestCopyFailure(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason   string
		latest   string // what is wrong with the latest set
		old      string // and with the old one
		reported int32  // failed machines that the old set reports
		machines int    // and that it has
		want     string
	}{
		"none":                   {"all is well", "", "", 1, 1, ""},
		"latest without machine": {"it is to have some", "no quota", "", 0, 0, "no quota"},
		"both":                   {"the latest set is what matters more", "no quota", "no class", 1, 1, "no quota"},
		"old":                    {"its machines do not go", "", "no class", 1, 1, "no class"},
		"old, not seen yet":      {"it has machines that the cache does not show", "", "no class", 1, 0, "no class"},
		"old, not reported yet":  {"it has machines", "", "no class", 0, 1, "no class"},
		"old without machines":   {"there is nothing that it should do", "", "no class", 0, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			failing := func(uid, message string) *v1alpha1.MachineSet {
				set := &v1alpha1.MachineSet{}
				set.UID = types.UID(uid)
				if message != "" {
					set.Status.Conditions = []v1alpha1.MachineSetCondition{{
						Type: v1alpha1.MachineSetReplicaFailure, Status: corev1.ConditionTrue, Reason: v1alpha1.ReasonInvalidSpec, Message: message,
					}}
				}

				return set
			}
			old, latest := failing("old", tc.old), failing("new", tc.latest)
			old.Status.Replicas = tc.reported
			p := &statusReport{ownedSets: &ownedSets{
				object: &object{deployment: &v1alpha1.MachineDeployment{}}, sets: []*v1alpha1.MachineSet{old, latest}, latest: latest,
				machines: map[types.UID][]*v1alpha1.Machine{old.UID: make([]*v1alpha1.Machine, tc.machines)},
			}}
			for i := range p.machines[old.UID] {
				p.machines[old.UID][i] = &v1alpha1.Machine{}
			}
			p.reportReplicaFailure()
			got := ""
			if c := conditionOf(&p.deployment.Status, v1alpha1.MachineDeploymentReplicaFailure); c != nil {
				got = c.Message
			}
			if got != tc.want {
				t.Errorf("the deployment reports %q, want %q: %s", got, tc.want, tc.reason)
			}
		})
	}
}
