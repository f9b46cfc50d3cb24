package lastgood

import (
	"encoding/json"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// acceptedPrefix begins the resourceVersion in references to accepted versions. The API
// server's own resource versions are numbers.
const acceptedPrefix = "accepted."

// acceptedLimit bounds what Accept writes, in bytes. The annotations of an object may
// have 256 KiB in total.
const acceptedLimit = 64 << 10

// accepted is the content of v1alpha1.AnnotationKeyAccepted: the fields of a class by
// which drivers find instances. It only holds references to secrets.
type accepted struct {
	Generation           int64                   `json:"generation"`
	Provider             string                  `json:"provider,omitempty"`
	ProviderSpec         runtime.RawExtension    `json:"providerSpec"`
	SecretRef            *corev1.SecretReference `json:"secretRef,omitempty"`
	CredentialsSecretRef *corev1.SecretReference `json:"credentialsSecretRef,omitempty"`
}

// Accept records in the class's annotation that its driver created an instance from its
// present version. It reports whether the class changed; the caller stores it.
func Accept(class *v1alpha1.MachineClass) (changed bool, err error) {
	if last, err := readAccepted(class); err == nil && last != nil && last.Generation == class.Generation {
		return false, nil
	}
	text, err := json.Marshal(accepted{
		Generation: class.Generation, Provider: class.Provider, ProviderSpec: class.ProviderSpec,
		SecretRef: class.SecretRef, CredentialsSecretRef: class.CredentialsSecretRef,
	})
	if err != nil {
		return false, fmt.Errorf("annotation %s of class %s: %w", v1alpha1.AnnotationKeyAccepted, class.Name, err)
	}
	if len(text) > acceptedLimit {
		return false, fmt.Errorf("annotation %s of class %s: %d bytes exceed the limit of %d, so the class's last good "+
			"version is not kept: before you edit the class, save a copy for the deletion of its machines",
			v1alpha1.AnnotationKeyAccepted, class.Name, len(text), acceptedLimit)
	}
	metav1.SetMetaDataAnnotation(&class.ObjectMeta, v1alpha1.AnnotationKeyAccepted, string(text))

	return true, nil
}

// LastAccepted returns the version of the class from which a driver last created an
// instance; nil if that is the present version or if there is none. Its resourceVersion
// is not the API server's: it names this version in fetches, see [Version].
func LastAccepted(class *v1alpha1.MachineClass) (*v1alpha1.MachineClass, error) {
	last, err := readAccepted(class)
	if err != nil || last == nil || last.Generation == class.Generation {
		return nil, err
	}
	former := class.DeepCopy()
	former.ResourceVersion = fmt.Sprintf("%s%d", acceptedPrefix, last.Generation)
	former.Generation = last.Generation
	former.Provider, former.ProviderSpec = last.Provider, last.ProviderSpec
	former.SecretRef, former.CredentialsSecretRef = last.SecretRef, last.CredentialsSecretRef

	return former, nil
}

// Version returns the class in the version that a driver asks for: the last accepted one
// if resourceVersion names it, otherwise the present one. If the class has moved to
// another provider, the accepted version has no labels, annotations or node template:
// these are for the new provider.
func Version(class *v1alpha1.MachineClass, resourceVersion string) *v1alpha1.MachineClass {
	if !strings.HasPrefix(resourceVersion, acceptedPrefix) {
		return class
	}
	former, err := LastAccepted(class)
	if err != nil || former == nil || former.ResourceVersion != resourceVersion {
		return class // a newer version was accepted since the request was sent
	}
	if former.Provider != class.Provider {
		former.Labels, former.Annotations, former.NodeTemplate = nil, nil, nil
	}

	return former
}

func readAccepted(class *v1alpha1.MachineClass) (*accepted, error) {
	text, ok := class.Annotations[v1alpha1.AnnotationKeyAccepted]
	if !ok {
		return nil, nil //nolint:nilnil // no instance was created from it yet
	}
	last := &accepted{}
	if err := json.Unmarshal([]byte(text), last); err != nil {
		return nil, fmt.Errorf("annotation %s of class %s: %w (remove the annotation; mcm writes it again)",
			v1alpha1.AnnotationKeyAccepted, class.Name, err)
	}

	return last, nil
}
