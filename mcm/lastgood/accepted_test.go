package lastgood_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/lastgood"
)

func TestLastAccepted(t *testing.T) {
	t.Parallel()
	class := &v1alpha1.MachineClass{
		ObjectMeta: metav1.ObjectMeta{Name: "small", Generation: 3, ResourceVersion: "7"}, Provider: "aws",
		ProviderSpec: runtime.RawExtension{Raw: []byte(`{"size":"s"}`)}, SecretRef: &corev1.SecretReference{Name: "boot"},
	}
	former, err := lastgood.LastAccepted(class)
	if former != nil || err != nil {
		t.Errorf("class that nothing was made from was accepted as %v, %v", former, err)
	}
	for _, want := range []bool{true, false} { // once is enough
		if changed, err := lastgood.Accept(class); changed != want || err != nil {
			t.Errorf("Accept returned %v, %v, want %v", changed, err, want)
		}
	}
	if former, err := lastgood.LastAccepted(class); former != nil || err != nil {
		t.Errorf("class that was not edited was last accepted as %v, %v", former, err)
	}
	edited := class.DeepCopy()
	edited.Generation, edited.ResourceVersion, edited.Provider = 4, "8", "gcp"
	edited.ProviderSpec.Raw, edited.SecretRef = []byte(`{"size":7}`), nil
	edited.CredentialsSecretRef = &corev1.SecretReference{Name: "keys"}
	former, err = lastgood.LastAccepted(edited)
	if err != nil {
		t.Fatal(err)
	}
	want := class.DeepCopy()
	want.ResourceVersion = "accepted.3"
	if diff := cmp.Diff(want, former); diff != "" {
		t.Errorf("last accepted (-want +got):\n%s", diff)
	}
	edited.Labels, edited.NodeTemplate = map[string]string{"made": "for gcp"}, &v1alpha1.NodeTemplate{Region: "of gcp"}
	former.Annotations = nil // of gcp's too
	for version, want := range map[string]*v1alpha1.MachineClass{"8": edited, "": edited, "accepted.3": former, "accepted.2": edited} {
		if diff := cmp.Diff(want, lastgood.Version(edited, version)); diff != "" {
			t.Errorf("version %q (-want +got):\n%s", version, diff)
		}
	}
}

// A provider that still has the class may know all of it.
func TestLastAcceptedOfTheSameProvider(t *testing.T) {
	t.Parallel()
	class := &v1alpha1.MachineClass{ObjectMeta: metav1.ObjectMeta{Name: "small", Generation: 3}, Provider: "aws"}
	if _, err := lastgood.Accept(class); err != nil {
		t.Fatal(err)
	}
	class.Generation, class.ProviderSpec.Raw = 4, []byte(`{}`)
	class.Labels, class.NodeTemplate = map[string]string{"pool": "a"}, &v1alpha1.NodeTemplate{Region: "r"}
	got := lastgood.Version(class, "accepted.3")
	if got.Labels["pool"] != "a" || got.NodeTemplate == nil || got.ProviderSpec.Raw != nil {
		t.Errorf("version is %+v", got)
	}
}

func TestAcceptFaults(t *testing.T) {
	t.Parallel()
	class := &v1alpha1.MachineClass{ObjectMeta: metav1.ObjectMeta{Name: "small", Generation: 2}}
	class.Annotations = map[string]string{v1alpha1.AnnotationKeyAccepted: "what?"}
	if former, err := lastgood.LastAccepted(class); former != nil || err == nil || !strings.Contains(err.Error(), "remove the annotation") {
		t.Errorf("unreadable annotation gives %v, %v", former, err)
	}
	if changed, err := lastgood.Accept(class); !changed || err != nil {
		t.Errorf("unreadable annotation is not replaced: %v, %v", changed, err)
	}
	class.Generation, class.ProviderSpec.Raw = 3, []byte(`"`+strings.Repeat("x", 64<<10)+`"`)
	before := class.DeepCopy()
	if changed, err := lastgood.Accept(class); changed || err == nil || !strings.Contains(err.Error(), "exceed the limit") {
		t.Errorf("huge class is accepted: %v, %v", changed, err)
	}
	if diff := cmp.Diff(before, class); diff != "" {
		t.Errorf("huge class was changed:\n%s", diff)
	}
}
