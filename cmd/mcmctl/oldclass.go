package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/yaml"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// maxClass exceeds the largest object that an API server stores.
const maxClass = 3 << 20

// readFile reads one object; name - is stdin.
func readFile(stdin io.Reader, name string) (*unstructured.Unstructured, error) {
	from := stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		from = f
	} else {
		name = "standard input"
	}
	content, err := io.ReadAll(io.LimitReader(from, maxClass+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	if len(content) > maxClass {
		return nil, fmt.Errorf("%s is larger than %d bytes, more than a class can have", name, maxClass)
	}
	o := &unstructured.Unstructured{}
	if err := yaml.UnmarshalStrict(content, &o.Object); err != nil {
		return nil, fmt.Errorf("%s: want one object as YAML or JSON: %w", name, err)
	}
	if o.GetKind() == "" || o.GetAPIVersion() == "" || o.GetName() == "" {
		return nil, fmt.Errorf("%s: an object needs apiVersion, kind and metadata.name", name)
	}

	return o, nil
}

// machineClass turns a driver's answer into an object that can be applied. Name,
// namespace and provider default to those of the old class. Fields that only an API
// server sets are removed.
func machineClass(answer []byte, old *unstructured.Unstructured, provider string) (*unstructured.Unstructured, error) {
	class := &unstructured.Unstructured{}
	if err := json.Unmarshal(answer, &class.Object); err != nil {
		return nil, fmt.Errorf("its answer is not JSON: %w", err)
	}
	if class.Object == nil {
		return nil, errors.New("its answer is empty")
	}
	apiVersion := v1alpha1.SchemeGroupVersion.String()
	if class.GetKind() != v1alpha1.KindMachineClass || class.GetAPIVersion() != apiVersion {
		return nil, fmt.Errorf("its answer has kind %q and apiVersion %q: want %s and %s",
			class.GetKind(), class.GetAPIVersion(), v1alpha1.KindMachineClass, apiVersion)
	}
	if _, ok := class.Object["providerSpec"].(map[string]any); !ok {
		return nil, errors.New("its answer has no providerSpec")
	}
	if class.GetName() == "" {
		class.SetName(old.GetName())
	}
	if class.GetNamespace() == "" {
		class.SetNamespace(old.GetNamespace())
	}
	if class.Object["provider"] == nil {
		class.Object["provider"] = provider
	}
	annotations := class.GetAnnotations()
	delete(annotations, corev1.LastAppliedConfigAnnotation)
	if len(annotations) == 0 {
		annotations = nil
	}
	class.SetAnnotations(annotations)
	for _, field := range []string{
		"uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds",
		"managedFields", "selfLink", "ownerReferences", "finalizers",
	} {
		unstructured.RemoveNestedField(class.Object, "metadata", field)
	}

	return class, nil
}
