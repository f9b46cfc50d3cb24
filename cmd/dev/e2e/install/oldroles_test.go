package install

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// TestRunWithOldRoles runs mcm through all that it does with the rights of the machine
// controller manager alone: who replaces that one need not change them first.
func TestRunWithOldRoles(t *testing.T) {
	r := newRig(t, "kustomize/install")
	// Those roles let no namespace be read.
	r.identity = &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "machinebus-control-plane-key"}}
	for _, o := range r.objects {
		if strings.HasSuffix(o.GetKind(), "Role") || strings.HasSuffix(o.GetKind(), "RoleBinding") {
			r.must(client.IgnoreNotFound(shared.kube.Delete(t.Context(), o.DeepCopy())))
		}
	}
	old, err := stack.LoadYAML("testdata/oldroles.yaml")
	r.must(err)
	t.Cleanup(func() { deleteAll(t, old) })
	r.must(stack.Apply(t.Context(), shared.kube, old...))
	r.startEmbedded(quick...)
	r.everything()
}

func deleteAll(t *testing.T, objects []*unstructured.Unstructured) {
	t.Helper()
	for _, o := range objects {
		if err := client.IgnoreNotFound(shared.kube.Delete(context.WithoutCancel(t.Context()), o)); err != nil {
			t.Error(err)
		}
	}
}
