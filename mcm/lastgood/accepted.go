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

// acceptedPrefix begins the resourceVersion in references to accepted versions.
// Those of the API server are numbers.
const acceptedPrefix = "accepted."

// acceptedLimit bounds what Accept writes, in bytes: all annotations of an object
// together may take 256 KiB.
const acceptedLimit = 64 << 10

// accepted is what v1alpha1.AnnotationKeyAccepted holds: the fields of a class
// from which drivers find instances again. It names secrets and holds none.
type accepted struct {
	Generation           int64                   `json:"generation"`
	Provider             string                  `json:"provider,omitempty"`
	ProviderSpec         runtime.RawExtension    `json:"providerSpec"`
	SecretRef            *corev1.SecretReference `json:"secretRef,omitempty"`
	CredentialsSecretRef *corev1.SecretReference `json:"credentialsSecretRef,omitempty"`
}

// Accept notes on a class that its driver has made an instance from it as it
// stands. It tells whether that changed the class, which the caller stores.
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
		return false, fmt.Errorf("annotation %s of class %s: %d bytes are too large for an annotation (limit %d): "+
			"if the class is edited, keep a copy of what its machines were made from", v1alpha1.AnnotationKeyAccepted, class.Name,
			len(text), acceptedLimit)
	}
	metav1.SetMetaDataAnnotation(&class.ObjectMeta, v1alpha1.AnnotationKeyAccepted, string(text))

	return true, nil
}

// LastAccepted returns the class as a driver last made an instance from it, nil
// when that is the class as it stands or when there is none. Its resourceVersion
// is not the API server's and names this version in fetches; see Version.
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

// Version returns the class in the version that a driver asks for: the last
// accepted one when that is meant, and otherwise as it stands. What the class has
// besides is left out of one that was another provider's: by now it is not meant
// for that one.
func Version(class *v1alpha1.MachineClass, resourceVersion string) *v1alpha1.MachineClass {
	if !strings.HasPrefix(resourceVersion, acceptedPrefix) {
		return class
	}
	former, err := LastAccepted(class)
	if err != nil || former == nil || former.ResourceVersion != resourceVersion {
		return class // accepted anew since the request was sent
	}
	if former.Provider != class.Provider {
		former.Labels, former.Annotations, former.NodeTemplate = nil, nil, nil
	}

	return former
}

func readAccepted(class *v1alpha1.MachineClass) (*accepted, error) {
	text, ok := class.Annotations[v1alpha1.AnnotationKeyAccepted]
	if !ok {
		return nil, nil //nolint:nilnil // nothing was made from it so far
	}
	last := &accepted{}
	if err := json.Unmarshal([]byte(text), last); err != nil {
		return nil, fmt.Errorf("annotation %s of class %s: %w (remove it; it is written again)",
			v1alpha1.AnnotationKeyAccepted, class.Name, err)
	}

	return last, nil
}
