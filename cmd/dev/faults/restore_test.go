package main

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestUnchanged distinguishes restores with and without an effect.
func TestUnchanged(t *testing.T) {
	t.Parallel()
	machine := func(uid, version string) v1alpha1.Machine {
		return v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{UID: types.UID(uid), ResourceVersion: version}}
	}
	a, b := machine("a", "1"), machine("b", "2")
	before := map[types.UID]*v1alpha1.Machine{"a": &a, "b": &b}
	for name, tc := range map[string]struct {
		now  []v1alpha1.Machine
		want bool
	}{
		"all as before":   {[]v1alpha1.Machine{b, a}, true},
		"one is gone":     {[]v1alpha1.Machine{a}, false},
		"one is back":     {[]v1alpha1.Machine{a, b, machine("c", "3")}, false},
		"one for another": {[]v1alpha1.Machine{a, machine("c", "2")}, false},
		"one is older":    {[]v1alpha1.Machine{a, machine("b", "1")}, false},
	} {
		if got := unchanged(before, tc.now); got != tc.want {
			t.Errorf("%s: unchanged is %t", name, got)
		}
	}
}
