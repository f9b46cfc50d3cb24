package e2e

import (
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// TestFixtures applies manifests written for the existing machine controller
// manager: a real API server must take them and keep every field.
func TestFixtures(t *testing.T) {
	t.Parallel()
	e := newPlane(t, nil)
	files, err := filepath.Glob("../../../mcm/api/v1alpha1/testdata/*.yaml")
	e.must(err)
	if len(files) == 0 {
		t.Fatal("there are no fixtures")
	}
	for _, file := range files {
		objects, err := stack.LoadYAML(file)
		e.must(err)
		for _, object := range objects {
			object.SetNamespace(e.name)
			object.SetOwnerReferences(nil) // the garbage collector deletes what has an owner that is not there
			want := object.DeepCopy()
			got := object.DeepCopy()
			// Strict, so that the server refuses what it would silently drop.
			if err := e.kube.Create(e.ctx(), got, client.FieldValidation("Strict")); err != nil {
				t.Errorf("%s: %s %s: %v", filepath.Base(file), object.GetKind(), object.GetName(), err)
				continue
			}
			if status, ok := want.Object["status"]; ok {
				got.Object["status"] = status
				e.must(e.kube.Status().Update(e.ctx(), got))
			}
			e.must(e.kube.Get(e.ctx(), client.ObjectKeyFromObject(want), got))
			if diff := cmp.Diff(withoutAdditions(want), withoutAdditions(got)); diff != "" {
				t.Errorf("%s: %s %s changed on its way through the API server (-want +got):\n%s",
					filepath.Base(file), object.GetKind(), object.GetName(), diff)
			}
		}
	}
}

// withoutAdditions leaves out what the API server adds to every object, and null,
// which means the same as absence.
func withoutAdditions(object *unstructured.Unstructured) any {
	content := object.DeepCopy().Object
	for _, field := range []string{"uid", "resourceVersion", "generation", "creationTimestamp", "managedFields"} {
		unstructured.RemoveNestedField(content, "metadata", field)
	}
	return withoutNull(content)
}

func withoutNull(value any) any {
	switch value := value.(type) {
	case map[string]any:
		for key, field := range value {
			if field == nil {
				delete(value, key)
			} else {
				value[key] = withoutNull(field)
			}
		}
	case []any:
		for i, element := range value {
			value[i] = withoutNull(element)
		}
	}
	return value
}
