package stack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// fieldOwner is the owner of the fields that Apply sets.
const fieldOwner = client.FieldOwner("machinebus-stack")

// LoadYAML reads all objects of a YAML file, or of the YAML files of a folder in
// the order of their names.
func LoadYAML(path string) ([]*unstructured.Unstructured, error) {
	files := []string{path}
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		files, err = filepath.Glob(filepath.Join(path, "*.yaml"))
		if err != nil {
			return nil, err
		}
		if len(files) == 0 {
			return nil, fmt.Errorf("no *.yaml files in %s", path)
		}
	}
	var objects []*unstructured.Unstructured
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(content), len(content))
		for {
			object, err := nextObject(decoder)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			if len(object.Object) > 0 { // not between two --- with comments only
				objects = append(objects, object)
			}
		}
	}
	return objects, nil
}

// nextObject decodes integers as integers, like the API machinery.
func nextObject(decoder *yaml.YAMLOrJSONDecoder) (*unstructured.Unstructured, error) {
	var raw runtime.RawExtension
	if err := decoder.Decode(&raw); err != nil {
		return nil, err
	}
	object := &unstructured.Unstructured{}
	if len(raw.Raw) == 0 {
		return object, nil
	}
	return object, json.Unmarshal(raw.Raw, &object.Object)
}

// Apply applies objects by server-side apply.
func Apply(ctx context.Context, c client.Client, objects ...*unstructured.Unstructured) error {
	for _, object := range objects {
		err := c.Apply(ctx, client.ApplyConfigurationFromUnstructured(object), fieldOwner, client.ForceOwnership)
		if err != nil {
			return fmt.Errorf("apply %s %s: %w", object.GetKind(), object.GetName(), err)
		}
	}
	return nil
}

// ApplyCRDs applies the CRDs of a folder that the cluster does not have, waits until all
// are served, and returns the names of those it created.
func ApplyCRDs(ctx context.Context, c client.Client, dir string) (made []string, err error) {
	objects, err := LoadYAML(dir)
	if err != nil {
		return nil, err
	}
	for _, object := range objects {
		crd := &apiextensionsv1.CustomResourceDefinition{}
		err := c.Get(ctx, client.ObjectKeyFromObject(object), crd)
		if err == nil {
			continue
		}
		if !apierrors.IsNotFound(err) {
			return made, err
		}
		if err := Apply(ctx, c, object); err != nil {
			return made, err
		}
		made = append(made, object.GetName())
	}
	for _, object := range objects {
		err := Poll(ctx, "CRD "+object.GetName()+" is established", func(ctx context.Context) error {
			return established(ctx, c, object.GetName())
		})
		if err != nil {
			return made, err
		}
	}
	return made, nil
}

func established(ctx context.Context, c client.Client, name string) error {
	crd := &apiextensionsv1.CustomResourceDefinition{}
	if err := c.Get(ctx, client.ObjectKey{Name: name}, crd); err != nil {
		return err
	}
	var conditions []string
	for _, condition := range crd.Status.Conditions {
		if condition.Type == apiextensionsv1.Established && condition.Status == apiextensionsv1.ConditionTrue {
			return nil
		}
		conditions = append(conditions, fmt.Sprintf("%s=%s", condition.Type, condition.Status))
	}
	return fmt.Errorf("its conditions are [%s]", strings.Join(conditions, " "))
}
