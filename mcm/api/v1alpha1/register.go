package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupName is the API group of all objects of this package.
const GroupName = "machine.sapcloud.io"

// Kinds of this package as they are written in manifests and references.
const (
	KindMachine           = "Machine"
	KindMachineClass      = "MachineClass"
	KindMachineSet        = "MachineSet"
	KindMachineDeployment = "MachineDeployment"
)

var (
	// SchemeGroupVersion is the group and version of all objects of this package.
	SchemeGroupVersion = schema.GroupVersion{Group: GroupName, Version: "v1alpha1"}

	// SchemeBuilder collects what AddToScheme registers.
	SchemeBuilder = runtime.NewSchemeBuilder(addKnownTypes)

	// AddToScheme makes a scheme know the objects of this package. It is not safe for concurrent use on one scheme.
	AddToScheme = SchemeBuilder.AddToScheme
)

// Kind qualifies a kind of this package with its group.
func Kind(kind string) schema.GroupKind {
	return SchemeGroupVersion.WithKind(kind).GroupKind()
}

// Resource qualifies a resource of this package, such as "machines", with its group.
func Resource(resource string) schema.GroupResource {
	return SchemeGroupVersion.WithResource(resource).GroupResource()
}

func addKnownTypes(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(SchemeGroupVersion,
		&Machine{}, &MachineList{},
		&MachineClass{}, &MachineClassList{},
		&MachineSet{}, &MachineSetList{},
		&MachineDeployment{}, &MachineDeploymentList{},
	)
	metav1.AddToGroupVersion(scheme, SchemeGroupVersion)
	return nil
}
