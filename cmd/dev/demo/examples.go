package main

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// machineCount is the number of machines in the examples.
const machineCount = 10

// exampleFiles are applied in this order.
var exampleFiles = []string{"secret.yaml", "machineclass.yaml", "machines.yaml"}

// applyExamples applies deploy/examples as a user would, with the values of this run.
func (s *setup) applyExamples(ctx context.Context) error {
	var machines int
	for _, file := range exampleFiles {
		objects, err := stack.LoadYAML(s.paths.example(file))
		if err != nil {
			return err
		}
		for _, object := range objects {
			if err := s.adapt(object); err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
			if object.GetKind() == v1alpha1.KindMachine {
				machines++
			}
		}
		if err := stack.Apply(ctx, s.kube, objects...); err != nil {
			return err
		}
		s.detailf("applied %s", s.paths.short(s.paths.example(file)))
	}
	if machines != machineCount {
		return fmt.Errorf("the examples contain %d Machines instead of %d", machines, machineCount)
	}
	s.detailf("(changed in memory: the class's endpoint is %s and the Secret's apiToken is this cloud's)", s.cloud.Endpoint)
	if s.cluster.Foreign {
		s.detailf("(and their namespace is %s)", s.cluster.Namespace)
	}
	return nil
}

// adapt sets the values of an example that are known only at run time.
func (s *setup) adapt(object *unstructured.Unstructured) error {
	object.SetNamespace(s.cluster.Namespace)
	switch object.GetKind() {
	case "Secret":
		return unstructured.SetNestedField(object.Object, s.cloud.APIToken, "stringData", "apiToken")
	case v1alpha1.KindMachineClass:
		for _, reference := range []string{"secretRef", "credentialsSecretRef"} {
			if _, found, _ := unstructured.NestedMap(object.Object, reference); !found {
				continue
			}
			if err := unstructured.SetNestedField(object.Object, s.cluster.Namespace, reference, "namespace"); err != nil {
				return err
			}
		}
		return unstructured.SetNestedField(object.Object, s.cloud.Endpoint, "providerSpec", "endpoint")
	default:
		return nil
	}
}
