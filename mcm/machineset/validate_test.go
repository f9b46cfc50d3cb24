package machineset

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

func TestSelectorOf(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason string
		spoil  func(*v1alpha1.MachineSetSpec)
		want   []string
	}{
		"valid": {"as sets are", func(*v1alpha1.MachineSetSpec) {}, nil},
		"no class": {
			"there is nothing to make machines from",
			func(spec *v1alpha1.MachineSetSpec) { spec.Template.Spec.Class = v1alpha1.ClassSpec{} },
			[]string{"spec.template.spec.class needs a kind and a name: set kind to MachineClass"},
		},
		"no selector": {
			"no machine would ever count", func(spec *v1alpha1.MachineSetSpec) { spec.Selector = nil }, []string{"spec.selector must select something: set matchLabels"},
		},
		"empty selector": {
			"all machines would be the set's",
			func(spec *v1alpha1.MachineSetSpec) { spec.Selector = &metav1.LabelSelector{} },
			[]string{"spec.selector must select something: set matchLabels"},
		},
		"other labels": {
			"machines that were made would not count",
			func(spec *v1alpha1.MachineSetSpec) { spec.Template.Labels = nil },
			[]string{"spec.selector (pool=a) does not match the labels of spec.template: give the template these labels"},
		},
		"expression": {
			"that goes for expressions too", func(spec *v1alpha1.MachineSetSpec) {
				spec.Selector.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: "zone", Operator: "Exists"}}
			}, []string{"does not match"},
		},
		"bad operator": {
			"it cannot be evaluated", func(spec *v1alpha1.MachineSetSpec) {
				spec.Selector.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: "zone", Operator: "Near"}}
			}, []string{"Near"},
		},
		"all at once": {
			"all faults are reported, so that one correction is enough",
			func(spec *v1alpha1.MachineSetSpec) { *spec = v1alpha1.MachineSetSpec{Replicas: -1} },
			[]string{"negative", "kind and a name", "select something"},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			set := setOf(1)
			set.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"pool": "a"}}
			set.Spec.Template.Labels = map[string]string{"pool": "a"}
			set.Spec.Template.Spec.Class = v1alpha1.ClassSpec{Kind: v1alpha1.KindMachineClass, Name: "small"}
			tc.spoil(&set.Spec)
			_, err := selectorOf(set)
			if (err != nil) != (len(tc.want) > 0) {
				t.Fatalf("error is %v: %s", err, tc.reason)
			}
			for _, part := range tc.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("error is %q, want %q in it: %s", err, part, tc.reason)
				}
			}
		})
	}
}
