package mcmdriver

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"

	"github.com/gardener/machine-controller-manager/pkg/apis/machine/v1alpha1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/driversdk"
)

// Annotations that a driver finds on the Machine, in addition to those of the object.
const (
	// AnnotationOperationID is the same for all attempts at one operation: an idempotency
	// token, for a driver that wants one.
	AnnotationOperationID = "machinebus.io/operation-id"
	// AnnotationMachineUID is the uid of the Machine object.
	AnnotationMachineUID = "machinebus.io/machine-uid"
)

// userDataKey is the key of a Secret that instances boot from.
const userDataKey = "userData"

// Each call gets objects of its own: these drivers were handed copies, and some write to them.

func machine(req *request) *v1alpha1.Machine {
	m := req.Machine
	annotations := maps.Clone(m.Annotations)
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[AnnotationOperationID], annotations[AnnotationMachineUID] = req.OperationID, m.UID
	made := &v1alpha1.Machine{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: m.Namespace, Name: m.Name, UID: types.UID(m.UID), Labels: maps.Clone(m.Labels), Annotations: annotations,
		},
		Spec: v1alpha1.MachineSpec{
			Class:      v1alpha1.ClassSpec{Kind: "MachineClass", Name: req.Class.Name},
			ProviderID: m.ProviderID,
			NodeTemplateSpec: v1alpha1.NodeTemplateSpec{ObjectMeta: metav1.ObjectMeta{
				Labels: maps.Clone(m.NodeTemplate.Labels), Annotations: maps.Clone(m.NodeTemplate.Annotations),
			}},
		},
		Status: v1alpha1.MachineStatus{LastKnownState: m.LastKnownState},
	}
	for _, t := range m.NodeTemplate.Taints {
		made.Spec.NodeTemplateSpec.Spec.Taints = append(made.Spec.NodeTemplateSpec.Spec.Taints,
			corev1.Taint{Key: t.Key, Value: t.Value, Effect: corev1.TaintEffect(t.Effect)})
	}

	return made
}

func (d *Driver) class(of *driversdk.Class[json.RawMessage]) (*v1alpha1.MachineClass, error) {
	class := &v1alpha1.MachineClass{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: of.Namespace, Name: of.Name, UID: types.UID(of.UID), ResourceVersion: of.ResourceVersion,
			Labels: maps.Clone(of.Labels), Annotations: maps.Clone(of.Annotations),
		},
		Provider:             d.provider,
		ProviderSpec:         runtime.RawExtension{Raw: slices.Clone(of.Spec)},
		SecretRef:            reference(of.SecretRef),
		CredentialsSecretRef: reference(of.CredentialsSecretRef),
	}
	t := of.NodeTemplate
	if reflect.ValueOf(t).IsZero() {
		return class, nil
	}
	class.NodeTemplate = &v1alpha1.NodeTemplate{InstanceType: t.InstanceType, Region: t.Region, Zone: t.Zone}
	if t.Architecture != "" {
		class.NodeTemplate.Architecture = &t.Architecture
	}
	var err error
	if class.NodeTemplate.Capacity, err = quantities("capacity", t.Capacity); err != nil {
		return nil, err
	}
	class.NodeTemplate.VirtualCapacity, err = quantities("virtualCapacity", t.VirtualCapacity)

	return class, err
}

// reference returns nil for a reference to no Secret.
func reference(to driversdk.SecretReference) *corev1.SecretReference {
	if to.Name == "" {
		return nil
	}

	return &corev1.SecretReference{Namespace: to.Namespace, Name: to.Name}
}

func quantities(field string, of map[string]string) (corev1.ResourceList, error) {
	if of == nil {
		return nil, nil
	}
	list := corev1.ResourceList{}
	for name, text := range of {
		quantity, err := resource.ParseQuantity(text)
		if err != nil {
			return nil, driversdk.Errorf(driversdk.InvalidArgument, "nodeTemplate.%s[%s]: %q: %w", field, name, text, err)
		}
		list[corev1.ResourceName(name)] = quantity
	}

	return list, nil
}

// secret returns the keys of the class's secrets, with the user data of one machine. It has
// no name, as there may be two behind it.
func secret(of driversdk.Secret, userData []byte) *corev1.Secret {
	s := &corev1.Secret{Data: map[string][]byte{}}
	for key, value := range of {
		s.Data[key] = slices.Clone(value)
	}
	if _, has := of[userDataKey]; has {
		s.Data[userDataKey] = slices.Clone(userData)
	}

	return s
}
