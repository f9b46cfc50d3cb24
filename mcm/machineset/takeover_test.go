package machineset_test

import (
	"bytes"
	"errors"
	"io"
	"maps"
	"os"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// load makes the objects of a file, the machines of which are the set's, and
// returns the set.
func (r *rig) load(t *testing.T, path string) *v1alpha1.MachineSet {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(content), len(content))
	set := &v1alpha1.MachineSet{}
	for {
		raw := map[string]any{}
		if err := decoder.Decode(&raw); errors.Is(err, io.EOF) {
			return set
		} else if err != nil {
			t.Fatalf("%s: %s", path, err)
		}
		o := &unstructured.Unstructured{Object: raw}
		o.SetNamespace(r.namespace)
		if o.GetKind() == v1alpha1.KindMachine {
			r.dress(t, o, set)
		}
		status := raw["status"]
		r.create(t, o)
		o.Object["status"] = status
		if err := r.Status().Update(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		if o.GetKind() == v1alpha1.KindMachineSet {
			set.Name, set.Namespace, set.UID = o.GetName(), o.GetNamespace(), o.GetUID()
			set = r.get(t, set)
		}
	}
}

// dress gives a machine what it has from its set.
func (r *rig) dress(t *testing.T, m *unstructured.Unstructured, set *v1alpha1.MachineSet) {
	t.Helper()
	labels := m.GetLabels()
	if labels == nil {
		labels = map[string]string{}
	}
	maps.Copy(labels, set.Spec.Template.Labels)
	m.SetLabels(labels)
	m.SetFinalizers([]string{v1alpha1.FinalizerName})
	m.SetOwnerReferences([]metav1.OwnerReference{
		*metav1.NewControllerRef(set, v1alpha1.SchemeGroupVersion.WithKind(v1alpha1.KindMachineSet)),
	})
	class := map[string]any{"apiGroup": v1alpha1.GroupName, "kind": v1alpha1.KindMachineClass, "name": set.Spec.Template.Spec.Class.Name}
	if err := unstructured.SetNestedMap(m.Object, class, "spec", "class"); err != nil {
		t.Fatal(err)
	}
}

// TestTakeOverObjects takes over from the machine controller manager.
func TestTakeOverObjects(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	set := r.load(t, "testdata/takeover.yaml")
	halfway := &v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: set.Name + "-halfway"}}
	r.delete(t, halfway)
	r.startManager(t, managerOptions{})
	r.play(t)
	var there []string
	until(t, "the set has two of its machines and a new one", func() bool {
		there = names(r.machines(t))
		status := r.get(t, set).Status

		return len(there) == 3 && status.Replicas == 3 && status.ReadyReplicas == 2 &&
			slices.Contains(there, set.Name+"-runs") && slices.Contains(there, set.Name+"-retries")
	})
	got := r.get(t, set)
	if len(got.Status.Conditions) != 0 {
		t.Errorf("conditions are %+v, want the old failure gone", got.Status.Conditions)
	}
	if failed := got.Status.FailedMachines; len(failed) != 1 || failed[0].LastOperation.ErrorCode != "ResourceExhausted" {
		t.Errorf("failed machines are %+v", failed)
	}
	for _, m := range r.machines(t) {
		if m.Spec.NodeTemplateSpec.Labels["worker.gardener.cloud/pool"] != "pool-a" {
			t.Errorf("machine %s has not the template's labels for its Node", m.Name)
		}
	}
	if got.Annotations[v1alpha1.AnnotationKeyRevision] != "3" || got.Labels[v1alpha1.LabelKeyMachineTemplateHash] == "" {
		t.Errorf("the set has lost labels or annotations: %+v", got.ObjectMeta)
	}
}
