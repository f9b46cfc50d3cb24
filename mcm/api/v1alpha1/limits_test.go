package v1alpha1_test

import (
	"testing"

	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

func TestUpdateLimits(t *testing.T) {
	t.Parallel()
	const rolling, inPlace, recreate = v1alpha1.RollingUpdateMachineDeploymentStrategyType,
		v1alpha1.InPlaceUpdateMachineDeploymentStrategyType, v1alpha1.RecreateMachineDeploymentStrategyType
	cases := map[string]struct {
		reason                     string
		strategy                   v1alpha1.MachineDeploymentStrategyType
		surge, unavailable         string // empty for none
		replicas                   int32
		wantSurge, wantUnavailable int32
	}{
		"numbers":     {"as they are", rolling, "2", "1", 5, 2, 1},
		"percentages": {"surge up, unavailable down", rolling, "25%", "25%", 5, 2, 1},
		"nothing":     {"one must be able to move", rolling, "0", "10%", 5, 0, 1},
		"missing":     {"the same", rolling, "", "", 5, 0, 1},
		"nonsense":    {"it counts as 0", rolling, "a few", "2", 5, 0, 2},
		"negative":    {"it counts as 0", rolling, "-3", "2", 5, 0, 2},
		"enormous":    {"sums must not overflow", rolling, "2000000000", "0", 5, 1 << 24, 0},
		"too many":    {"no more can be unavailable than there are", rolling, "0", "9", 5, 0, 5},
		"no replicas": {"nothing to be unavailable", rolling, "0", "1", 0, 0, 0},
		"in place":    {"it has limits of its own", inPlace, "3", "1", 5, 3, 1},
		"recreate":    {"all machines go first", recreate, "2", "2", 5, 0, 0},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := v1alpha1.UpdateConfiguration{MaxSurge: parse(tc.surge), MaxUnavailable: parse(tc.unavailable)}
			spec := &v1alpha1.MachineDeploymentSpec{Replicas: tc.replicas, Strategy: v1alpha1.MachineDeploymentStrategy{
				Type:          tc.strategy,
				RollingUpdate: &v1alpha1.RollingUpdateMachineDeployment{UpdateConfiguration: c},
				InPlaceUpdate: &v1alpha1.InPlaceUpdateMachineDeployment{UpdateConfiguration: c},
			}}
			if surge, unavailable := spec.UpdateLimits(); surge != tc.wantSurge || unavailable != tc.wantUnavailable {
				t.Errorf("%s: want surge %d, unavailable %d; got %d, %d", tc.reason, tc.wantSurge, tc.wantUnavailable, surge, unavailable)
			}
		})
	}
	spec := &v1alpha1.MachineDeploymentSpec{Replicas: 3, Strategy: v1alpha1.MachineDeploymentStrategy{Type: rolling}}
	if surge, unavailable := spec.UpdateLimits(); surge != 0 || unavailable != 0 {
		t.Errorf("half a strategy has limits %d, %d, want none", surge, unavailable)
	}
}

func parse(text string) *intstr.IntOrString {
	if text == "" {
		return nil
	}
	value := intstr.Parse(text)

	return &value
}
