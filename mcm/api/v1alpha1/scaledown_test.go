package v1alpha1

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestKeepFromScaleDown(t *testing.T) {
	t.Parallel()
	const disabled, ours = AnnotationKeyScaleDownDisabled, AnnotationKeyScaleDownDisabledByMCM
	for name, tc := range map[string]struct {
		reason    string
		keep      bool
		has, want map[string]string
	}{
		"kept":           {"with the proof that it is ours", true, nil, map[string]string{disabled: "true", ours: "true"}},
		"kept already":   {"nothing changes", true, map[string]string{disabled: "true", ours: "true"}, map[string]string{disabled: "true", ours: "true"}},
		"kept by a user": {"it stays theirs", true, map[string]string{disabled: "true"}, map[string]string{disabled: "true"}},
		"allowed by a user": {
			"their word counts, whatever it is", true, map[string]string{disabled: "false"}, map[string]string{disabled: "false"},
		},
		"released":              {"both go", false, map[string]string{disabled: "true", ours: "true", "x": "y"}, map[string]string{"x": "y"}},
		"released, by a user":   {"theirs stays", false, map[string]string{disabled: "true"}, map[string]string{disabled: "true"}},
		"released, none there":  {"nothing to do", false, nil, nil},
		"released, not in fact": {"the proof says no", false, map[string]string{disabled: "true", ours: "no"}, map[string]string{disabled: "true", ours: "no"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Annotations: tc.has}}
			KeepFromScaleDown(node, tc.keep)
			if diff := cmp.Diff(tc.want, node.Annotations, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("%s (-want +got):\n%s", tc.reason, diff)
			}
		})
	}
}
