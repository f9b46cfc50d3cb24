package main

import (
	"path"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

func loadExamples(t *testing.T) map[string][]*unstructured.Unstructured {
	t.Helper()
	byKind := map[string][]*unstructured.Unstructured{}
	for _, file := range exampleFiles {
		objects, err := stack.LoadYAML(paths{root: filepath.Join("..", "..", "..")}.example(file))
		if err != nil {
			t.Fatal(err)
		}
		for _, object := range objects {
			byKind[object.GetKind()] = append(byKind[object.GetKind()], object)
		}
	}
	return byKind
}

// TestHeldBack: the story depends on the names in the examples.
func TestHeldBack(t *testing.T) {
	t.Parallel()
	machines := loadExamples(t)[v1alpha1.KindMachine]
	held := 0
	for _, machine := range machines {
		if slices.ContainsFunc(heldBack, func(pattern string) bool {
			ok, err := path.Match(pattern, machine.GetName())
			return err == nil && ok
		}) {
			held++
		}
	}
	if len(machines) != machineCount || held != heldCount {
		t.Errorf("%q match %d of the %d machines of the examples, want %d of %d",
			heldBack, held, len(machines), heldCount, machineCount)
	}
}

func TestAdapt(t *testing.T) {
	t.Parallel()
	s := &setup{
		cluster: cluster{Namespace: "elsewhere"},
		cloud:   &stack.Cloud{Endpoint: "http://127.0.0.1:1", APIToken: "token-of-today"},
	}
	examples := loadExamples(t)
	cases := map[string]struct {
		reason string
		kind   string
		fields map[string][]string // what must be where
	}{
		"Secret": {
			reason: "each cloud has a token of its own", kind: "Secret",
			fields: map[string][]string{"token-of-today": {"stringData", "apiToken"}, "elsewhere": {"metadata", "namespace"}},
		},
		"Class": {
			reason: "each cloud has a port of its own", kind: v1alpha1.KindMachineClass,
			fields: map[string][]string{"http://127.0.0.1:1": {"providerSpec", "endpoint"}, "elsewhere": {"secretRef", "namespace"}},
		},
		"Machine": {
			reason: "a foreign cluster's default namespace is not ours", kind: v1alpha1.KindMachine,
			fields: map[string][]string{"elsewhere": {"metadata", "namespace"}},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, object := range examples[c.kind] {
				if err := s.adapt(object); err != nil {
					t.Fatal(err)
				}
				for want, field := range c.fields {
					got, _, err := unstructured.NestedString(object.Object, field...)
					if diff := cmp.Diff(want, got); diff != "" || err != nil {
						t.Errorf("%v: %s (-want +got):\n%s%v", field, c.reason, diff, err)
					}
				}
			}
		})
	}
}
