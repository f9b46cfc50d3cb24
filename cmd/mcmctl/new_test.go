package main

import (
	"bufio"
	"errors"
	"io"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	yamlutil "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

// TestNewDriver has an API server with our CRDs take what a new driver ships, as it is and strictly.
func TestNewDriver(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "driver")
	out, _, err := mcmctl(t, "new", "driver", "my-cloud", "--dir", dir, "--module", "example.com/mine")
	if err != nil || !strings.Contains(out, dir) {
		t.Fatalf("mcmctl new driver: %q, %v", out, err)
	}
	if mod := content(t, filepath.Join(dir, "go.mod")); !strings.HasPrefix(mod, "module example.com/mine\n") {
		t.Errorf("go.mod has another module:\n%s", mod)
	}
	if err := control.client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "machinebus"}}); err != nil {
		t.Fatal(err)
	}
	kinds := map[string]int{}
	for _, folder := range []string{"example", "deploy"} {
		files, err := filepath.Glob(filepath.Join(dir, folder, "*.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			for _, object := range objectsIn(t, content(t, file)) {
				kinds[object.GetKind()]++
				if err := control.client.Create(t.Context(), object, client.DryRunAll, client.FieldValidation("Strict")); err != nil {
					t.Errorf("%s: %v", filepath.Base(file), err)
				}
			}
		}
	}
	for _, kind := range []string{"MachineClass", "Secret", "Machine", "Deployment", "ServiceAccount", "PodDisruptionBudget", "NetworkPolicy"} {
		if kinds[kind] != 1 {
			t.Errorf("%d objects of kind %s, want 1", kinds[kind], kind)
		}
	}
	if _, _, err := mcmctl(t, "new", "driver", "my-cloud", "--dir", dir); err == nil || !strings.Contains(err.Error(), dir+" is not empty") {
		t.Errorf("want an error that names the folder that is not empty: %v", err)
	}
}

// TestNewDriver_Manifests has a new driver run as driver-virtual does.
func TestNewDriver_Manifests(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "driver")
	if _, _, err := mcmctl(t, "new", "driver", "my-cloud", "--dir", dir); err != nil {
		t.Fatal(err)
	}
	have := map[string]any{}
	for _, object := range objectsIn(t, content(t, filepath.Join(dir, "deploy", "driver.yaml"))) {
		have[object.GetKind()] = object.Object
	}
	// What differs besides the namespace, which a kustomization sets there.
	adapt := strings.NewReplacer("driver-virtual", "driver-my-cloud", "image: machinebus/", "image: registry.example.com/",
		"        - {port: 18080} # virtual-cloud\n", "",
		"- --clusters=default\n", "- --clusters=default\n            - --cloud-url=https://api.my-cloud.example.com\n", "app.kubernetes.io/part-of: machinebus\n", "\n")
	want := map[string]any{}
	for _, name := range []string{"service-account", "deployment", "disruption-budget", "network-policy"} {
		for _, object := range objectsIn(t, adapt.Replace(content(t, "../../deploy/kustomize/driver-virtual/"+name+".yaml"))) {
			object.SetNamespace("machinebus")
			want[object.GetKind()] = object.Object
		}
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("cmd/mcmctl/newdriver/template/deploy/driver.yaml.tmpl differs from deploy/kustomize/driver-virtual (-there +here):\n%s", diff)
	}
}

// objectsIn returns the objects of a text in YAML.
func objectsIn(t *testing.T, text string) (objects []*unstructured.Unstructured) {
	t.Helper()
	documents := yamlutil.NewYAMLReader(bufio.NewReader(strings.NewReader(text)))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return objects
		}
		object := &unstructured.Unstructured{}
		if err := errors.Join(err, yaml.UnmarshalStrict(document, &object.Object)); err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		objects = append(objects, object)
	}
}
