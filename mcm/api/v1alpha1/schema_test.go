package v1alpha1_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	structuralschema "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/listtype"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// server takes objects of one kind the way an API server with the generated CRD does.
type server struct {
	structural *structuralschema.Structural
	validator  validation.SchemaValidator
}

// servers makes one server per kind. It fails if an API server would refuse the schema itself.
func servers(t *testing.T) map[string]server {
	t.Helper()

	out := map[string]server{}
	for kind, crd := range crds(t) {
		v1Schema := crd.Spec.Versions[0].Schema.OpenAPIV3Schema
		schema := &apiextensions.JSONSchemaProps{}
		if err := apiextensionsv1.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps(v1Schema, schema, nil); err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		structural, err := structuralschema.NewStructural(schema)
		if err != nil {
			t.Fatalf("%s: the schema is not structural: %v", kind, err)
		}
		if errs := structuralschema.ValidateStructural(field.NewPath(kind), structural); len(errs) > 0 {
			t.Fatalf("%s: the schema is not structural: %v", kind, errs.ToAggregate())
		}
		validator, _, err := validation.NewSchemaValidator(schema)
		if err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		out[kind] = server{structural: structural, validator: validator}
	}
	return out
}

// take returns what the server would store of an object, which fields it would drop, and why it refuses the object. The
// rules are left to TestRules.
func (s server) take(object map[string]any) (stored map[string]any, dropped []string, refused error) {
	stored = runtime.DeepCopyJSON(object)
	dropped = pruning.PruneWithOptions(stored, s.structural, true, structuralschema.UnknownFieldPathOptions{TrackUnknownFieldPaths: true})
	defaulting.PruneNonNullableNullsWithoutDefaults(stored, s.structural)
	errs := validation.ValidateCustomResource(nil, stored, s.validator)
	errs = append(errs, listtype.ValidateListSetsAndMaps(nil, s.structural, stored)...)
	return stored, dropped, errs.ToAggregate()
}

func TestSchemaTakesFixtures(t *testing.T) {
	t.Parallel()

	byKind := servers(t)
	for name, f := range fixtures(t, "testdata/*.yaml", "../../../deploy/examples/machine*.yaml") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			s, ok := byKind[f.kind()]
			if !ok {
				t.Fatalf("no CRD for kind %q", f.kind())
			}
			stored, dropped, err := s.take(f.tree)
			if err != nil {
				t.Errorf("refused: %v", err)
			}
			if len(dropped) > 0 {
				t.Errorf("the schema lacks these fields, so they are lost: %v", dropped)
			}
			if diff := cmp.Diff(normal(f.tree), normal(stored)); diff != "" {
				t.Errorf("stored otherwise than applied (-applied +stored):\n%s", diff)
			}
		})
	}
}

func TestSchema(t *testing.T) {
	t.Parallel()

	class := func(rest string) string {
		return "{apiVersion: machine.sapcloud.io/v1alpha1, kind: MachineClass, metadata: {name: c}" + rest + "}"
	}
	machine := func(rest string) string {
		return "{apiVersion: machine.sapcloud.io/v1alpha1, kind: Machine, metadata: {name: m}" + rest + "}"
	}
	deployment := func(spec string) string {
		return "{apiVersion: machine.sapcloud.io/v1alpha1, kind: MachineDeployment, metadata: {name: d}, spec: " + spec + "}"
	}
	cases := map[string]struct {
		reason  string
		object  string
		refused string   // part of the error; empty if the object is to be taken
		dropped []string // fields that go without an error
	}{
		"class without providerSpec": {
			reason:  "No driver can make anything of such a class.",
			object:  class(", provider: virtual"),
			refused: "providerSpec: Required value",
		},
		"class with a text as providerSpec": {
			reason:  "Drivers decode an object.",
			object:  class(", providerSpec: m5.large"),
			refused: "providerSpec: Invalid value",
		},
		"class with a nodeTemplate without zone": {
			reason:  "The autoscaler needs all of it.",
			object:  class(", providerSpec: {}, nodeTemplate: {capacity: {}, instanceType: a, region: b}"),
			refused: "nodeTemplate.zone: Required value",
		},
		"class with a nodeTemplate without capacity": {
			reason:  "The autoscaler needs all of it.",
			object:  class(", providerSpec: {}, nodeTemplate: {zone: c, instanceType: a, region: b}"),
			refused: "nodeTemplate.capacity: Required value",
		},
		"class with a capacity that is no quantity": {
			reason:  "It could not be decoded.",
			object:  class(", providerSpec: {}, nodeTemplate: {capacity: {cpu: lots}, zone: c, instanceType: a, region: b}"),
			refused: "nodeTemplate.capacity.cpu: Invalid value",
		},
		"class with more in its nodeTemplate than we know": {
			reason: "Other programs may keep data there; the schema of MCM lets them.",
			object: class(", providerSpec: {}, nodeTemplate: {capacity: {}, zone: c, instanceType: a, region: b, rack: 7}"),
		},
		"class with fields under spec": {
			reason:  "A class has no spec: its fields stand at the top level.",
			object:  class(", providerSpec: {}, spec: {provider: virtual}"),
			dropped: []string{"spec"},
		},
		"machine with its settings under a key": {
			reason:  "The settings stand in the spec itself.",
			object:  machine(", spec: {machineConfiguration: {drainTimeout: 1h}}"),
			dropped: []string{"spec.machineConfiguration"},
		},
		"machine with a number as timeout": {
			reason:  "A number has no unit.",
			object:  machine(", spec: {drainTimeout: 20}"),
			refused: "spec.drainTimeout: Invalid value",
		},
		"machine with a taint without effect": {
			reason:  "It could not be applied to the Node.",
			object:  machine(", spec: {nodeTemplate: {spec: {taints: [{key: a}]}}}"),
			refused: "spec.nodeTemplate.spec.taints[0].effect: Required value",
		},
		"machine with unknown metadata in its nodeTemplate": {
			reason: "Metadata is kept whatever it holds.",
			object: machine(", spec: {nodeTemplate: {metadata: {clusterName: old}}}"),
		},
		"machine in an unknown phase": {
			reason: "There are no enumerations: a later version may add phases, and this one must be able to read them.",
			object: machine(", status: {currentStatus: {phase: Hibernating}}"),
		},
		"deployment without template": {
			reason:  "There is nothing to make machines from.",
			object:  deployment("{replicas: 1}"),
			refused: "spec.template: Required value",
		},
		"deployment with text as replicas": {
			reason:  "The autoscaler does sums with it.",
			object:  deployment(`{replicas: "3", template: {}}`),
			refused: "spec.replicas: Invalid value",
		},
		"deployment with a list as maxSurge": {
			reason:  "It is a number or a percentage.",
			object:  deployment("{template: {}, strategy: {rollingUpdate: {maxSurge: [1]}}}"),
			refused: "spec.strategy.rollingUpdate.maxSurge: Invalid value",
		},
	}
	byKind := servers(t)
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			object := tree(t, []byte(tc.object))
			_, dropped, err := byKind[object["kind"].(string)].take(object)
			switch {
			case tc.refused == "" && err != nil:
				t.Errorf("%s\nrefused: %v", tc.reason, err)
			case tc.refused != "" && (err == nil || !strings.Contains(err.Error(), tc.refused)):
				t.Errorf("%s\nwant an error with %q, got: %v", tc.reason, tc.refused, err)
			}
			if diff := cmp.Diff(tc.dropped, dropped); diff != "" {
				t.Errorf("%s\ndropped fields (-want +got):\n%s", tc.reason, diff)
			}
		})
	}
}
