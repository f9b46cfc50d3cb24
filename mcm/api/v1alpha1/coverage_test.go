package v1alpha1_test

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// TestFixturesCoverEveryField keeps the fixtures complete: a field that no fixture uses is tested by none of the tests
// that take them.
func TestFixturesCoverEveryField(t *testing.T) {
	t.Parallel()

	used := map[string]bool{}
	for _, f := range fixtures(t, "testdata/*.yaml") {
		addUsed(used, f.kind(), f.tree)
	}
	known := map[string]bool{}
	for kind, object := range map[string]any{
		v1alpha1.KindMachine:           v1alpha1.Machine{},
		v1alpha1.KindMachineClass:      v1alpha1.MachineClass{},
		v1alpha1.KindMachineSet:        v1alpha1.MachineSet{},
		v1alpha1.KindMachineDeployment: v1alpha1.MachineDeployment{},
	} {
		addKnown(known, kind, reflect.TypeOf(object))
	}
	if len(known) < 200 {
		t.Fatalf("the walk found only %d fields; it is broken", len(known))
	}
	for _, path := range slices.Sorted(maps.Keys(known)) {
		if !used[path] {
			t.Errorf("no fixture uses %s", path)
		}
	}
}

// addUsed adds the paths of all values in a tree that are not null.
func addUsed(used map[string]bool, path string, value any) {
	switch v := value.(type) {
	case nil:
		return
	case map[string]any:
		for key, value := range v {
			addUsed(used, path+"."+key, value)
		}
	case []any:
		for _, value := range v {
			addUsed(used, path, value)
		}
	}
	used[path] = true
}

// addKnown adds the paths of all fields of a type. It stops at types that encode themselves and at object metadata.
func addKnown(known map[string]bool, path string, t reflect.Type) {
	known[path] = true
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	encodesItself := reflect.PointerTo(t).Implements(reflect.TypeFor[json.Unmarshaler]())
	if t.Kind() != reflect.Struct || encodesItself || t == reflect.TypeFor[metav1.ObjectMeta]() {
		return
	}
	for field := range t.Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		if name == "" {
			addKnown(known, path, field.Type)
			continue
		}
		addKnown(known, path+"."+name, field.Type)
	}
}
