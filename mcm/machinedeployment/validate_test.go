package machinedeployment

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// The API server refuses these today; objects from before its rules are stored
// all the same.
func TestStoredBeforeTheRules(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason, want string
		spoil        func(*v1alpha1.MachineDeploymentSpec)
	}{
		"limits": {
			"limits cannot be guessed", "spec.strategy.rollingUpdate.maxSurge is missing: set a number such as 1",
			func(s *v1alpha1.MachineDeploymentSpec) { s.Strategy.RollingUpdate.MaxSurge = nil },
		},
		"no limits": {
			"the same", "spec.strategy.rollingUpdate is missing: set maxSurge and maxUnavailable",
			func(s *v1alpha1.MachineDeploymentSpec) { s.Strategy.RollingUpdate = nil },
		},
		"no number": {
			"nor can what it means", `maxSurge "many"`,
			func(s *v1alpha1.MachineDeploymentSpec) {
				s.Strategy.RollingUpdate.MaxSurge = &intstr.IntOrString{Type: intstr.String, StrVal: "many"}
			},
		},
		"class": {
			"no machine can be made of nothing", "spec.template.spec.class needs a kind and a name: set kind to MachineClass",
			func(s *v1alpha1.MachineDeploymentSpec) { s.Template.Spec.Class.Name = "" },
		},
		"replicas": {
			"there cannot be fewer than none", "spec.replicas must not be negative",
			func(s *v1alpha1.MachineDeploymentSpec) { s.Replicas = -1 },
		},
		"history": {
			"there cannot be fewer than none", "spec.revisionHistoryLimit must not be negative, not -1: leave it out",
			func(s *v1alpha1.MachineDeploymentSpec) { s.RevisionHistoryLimit = new(int32(-1)) },
		},
		"deadline": {
			"it would be over before the rollout begins", "spec.progressDeadlineSeconds must not be negative, not -1: leave it out",
			func(s *v1alpha1.MachineDeploymentSpec) { s.ProgressDeadlineSeconds = new(int32(-1)) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			one, labels := intstr.FromInt32(1), map[string]string{"pool": "a"}
			spec := &v1alpha1.MachineDeploymentSpec{
				Selector: &metav1.LabelSelector{MatchLabels: labels},
				Template: v1alpha1.MachineTemplateSpec{
					ObjectMeta: metav1.ObjectMeta{Labels: labels},
					Spec:       v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: "MachineClass", Name: "small"}},
				},
				Strategy: v1alpha1.MachineDeploymentStrategy{
					Type: v1alpha1.RollingUpdateMachineDeploymentStrategyType,
					RollingUpdate: &v1alpha1.RollingUpdateMachineDeployment{
						UpdateConfiguration: v1alpha1.UpdateConfiguration{MaxSurge: &one, MaxUnavailable: &one},
					},
				},
			}
			if err := invalid(spec); err != nil {
				t.Fatalf("a sound spec is refused: %v", err)
			}
			tc.spoil(spec)
			if err := invalid(spec); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error is %v, want it to hold %q: %s", err, tc.want, tc.reason)
			}
		})
	}
}
