package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// MachineClass is what instances are made from: a configuration that only the provider's driver understands, and the
// secrets that go with it. Many machines share one class.
//
// Its fields stand at the top level, and it has no status.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=machineclasses,shortName=mcc,scope=Namespaced
type MachineClass struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// NodeTemplate describes the Nodes of this class before there is one. The cluster-autoscaler needs it to scale up
	// from zero.
	//
	// +kubebuilder:pruning:PreserveUnknownFields
	NodeTemplate *NodeTemplate `json:"nodeTemplate,omitempty"`
	// CredentialsSecretRef names a Secret with credentials of the provider. Its keys win over those of secretRef, so
	// that classes may share credentials and differ in their userData.
	//
	// +kubebuilder:validation:XValidation:rule="has(self.name) && self.name != ''",message="names no Secret: set name, or leave credentialsSecretRef out"
	CredentialsSecretRef *corev1.SecretReference `json:"credentialsSecretRef,omitempty"`
	// ProviderSpec is the configuration of the instances. Only the provider's driver understands it.
	//
	// +kubebuilder:pruning:PreserveUnknownFields
	ProviderSpec runtime.RawExtension `json:"providerSpec"`
	// Provider names the driver that serves this class.
	Provider string `json:"provider,omitempty"`
	// SecretRef names a Secret with the key userData, the boot script of the instances, and possibly credentials of the
	// provider.
	//
	// +kubebuilder:validation:XValidation:rule="has(self.name) && self.name != ''",message="names no Secret: set name, or leave secretRef out"
	SecretRef *corev1.SecretReference `json:"secretRef,omitempty"`
}

// MachineClassList is a list of MachineClasses.
//
// +kubebuilder:object:root=true
type MachineClassList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []MachineClass `json:"items"`
}

// NodeTemplate describes the Nodes of a class.
type NodeTemplate struct {
	// Capacity of a Node. The keys cpu, gpu and memory have to be there.
	Capacity corev1.ResourceList `json:"capacity"`
	// VirtualCapacity is kept in the status of the Nodes: resources that no kubelet reports.
	VirtualCapacity corev1.ResourceList `json:"virtualCapacity,omitempty"`
	// InstanceType of the instances, in the provider's words.
	InstanceType string `json:"instanceType"`
	// Region of the instances.
	Region string `json:"region"`
	// Zone of the instances.
	Zone string `json:"zone"`
	// Architecture of the instances' processors, such as amd64.
	Architecture *string `json:"architecture,omitempty"`
}
