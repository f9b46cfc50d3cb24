package v1alpha1_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestRoundTrip shows that the Go types know every field that the fixtures use: decoding is strict, and what is encoded
// again says the same.
func TestRoundTrip(t *testing.T) {
	t.Parallel()

	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	for name, f := range fixtures(t, "testdata/*.yaml") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			object, _, err := decoder.Decode(f.yaml, nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			encoded, err := json.Marshal(object.DeepCopyObject())
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(normal(f.tree), normal(tree(t, encoded))); diff != "" {
				t.Errorf("lost or changed on the way through the Go types (-YAML +JSON):\n%s", diff)
			}
			// Patches and caches of unstructured objects take this way.
			unstructured, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tree(t, encoded), unstructured); diff != "" {
				t.Errorf("the unstructured form differs (-JSON +unstructured):\n%s", diff)
			}
		})
	}
}

// TestZeroTimesAreLeftOut guards the reason for omitzero: a null would be stored or refused, depending on the CRD.
func TestZeroTimesAreLeftOut(t *testing.T) {
	t.Parallel()

	encoded, err := json.Marshal([]any{v1alpha1.Machine{}, v1alpha1.MachineSet{
		Status: v1alpha1.MachineSetStatus{
			Conditions:     []v1alpha1.MachineSetCondition{{Type: v1alpha1.MachineSetFrozen, Status: "True"}},
			FailedMachines: []v1alpha1.MachineSummary{{Name: "m"}},
		},
	}})
	if err != nil {
		t.Fatal(err)
	}
	want := `[{},{"status":{"machineSetCondition":[{"type":"Frozen","status":"True"}],"failedMachines":[{"name":"m"}]}}]`
	if diff := cmp.Diff(want, string(encoded)); diff != "" {
		t.Error(diff)
	}
}

// emptyMeansSomething lists the objects that say something even when nothing is in them.
var emptyMeansSomething = []string{"selector", "providerSpec"}

// normal brings a tree to the form in which two spellings of the same are equal: nulls and empty objects, which an API
// server drops or readers cannot distinguish from absence, are left out; durations and quantities are spelt one way.
func normal(in any) any {
	switch v := in.(type) {
	case map[string]any:
		out := map[string]any{}
		for key, value := range v {
			value = normal(value)
			if s, ok := value.(string); ok && strings.HasSuffix(key, "Timeout") {
				value = normalDuration(s)
			}
			if quantities, ok := value.(map[string]any); ok && strings.HasSuffix(strings.ToLower(key), "capacity") {
				for name, quantity := range quantities {
					quantities[name] = fmt.Sprint(quantity)
				}
			}
			empty, ok := value.(map[string]any)
			if value == nil || ok && len(empty) == 0 && !slices.Contains(emptyMeansSomething, key) {
				continue
			}
			out[key] = value
		}
		return out
	case []any:
		out := make([]any, 0, len(v))
		for _, value := range v {
			out = append(out, normal(value))
		}
		return out
	}
	return in
}

func normalDuration(s string) string {
	d, err := time.ParseDuration(s)
	if err != nil {
		return s
	}
	return d.String()
}
