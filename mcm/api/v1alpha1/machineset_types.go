package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// MachineSet keeps a number of equal machines.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=machinesets,shortName=mcs,scope=Namespaced
// +kubebuilder:subresource:status
// +kubebuilder:subresource:scale:specpath=.spec.replicas,statuspath=.status.replicas
// +kubebuilder:printcolumn:name="Desired",type=integer,JSONPath=`.spec.replicas`,description="Desired number of machines"
// +kubebuilder:printcolumn:name="Current",type=integer,JSONPath=`.status.replicas`,description="Number of machines there are"
// +kubebuilder:printcolumn:name="Ready",type=integer,JSONPath=`.status.readyReplicas`,description="Number of machines whose Node is healthy"
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`,description="Time since the object was created"
// +kubebuilder:printcolumn:name="Available",type=integer,priority=1,JSONPath=`.status.availableReplicas`,description="Number of machines that can be worked with"
// +kubebuilder:printcolumn:name="Class",type=string,priority=1,JSONPath=`.spec.template.spec.class.name`,description="Class that machines are made from"
// +kubebuilder:printcolumn:name="Frozen",type=string,priority=1,JSONPath=`.metadata.labels.freeze`,description="True while no machines are made because there are too many"
// +kubebuilder:printcolumn:name="Failure",type=string,priority=1,JSONPath=`.status.machineSetCondition[?(@.type=="ReplicaFailure")].message`,description="Why machines cannot be created or deleted"
// +kubebuilder:printcolumn:name="Failed",type=string,priority=1,JSONPath=`.status.failedMachines[0].name`,description="First machine whose last operation failed"
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.failedMachines[0].lastOperation.description`,description="Why it failed"
type MachineSet struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// Spec is what the set is to be.
	Spec MachineSetSpec `json:"spec,omitempty,omitzero"`
	// Status is what was last seen of the set; the controllers write it.
	Status MachineSetStatus `json:"status,omitempty,omitzero"`
}

// MachineSetList is a list of MachineSets.
//
// +kubebuilder:object:root=true
type MachineSetList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []MachineSet `json:"items"`
}

// MachineSetSpec is what a set is to be.
type MachineSetSpec struct {
	// Replicas is the number of machines to keep; 0 if absent.
	Replicas int32 `json:"replicas,omitempty"`
	// Selector finds the machines of the set by their labels. The template's labels have to match it.
	Selector *metav1.LabelSelector `json:"selector,omitempty"`
	// MachineClass is shown in metrics only. The class that counts is the template's.
	MachineClass ClassSpec `json:"machineClass,omitempty,omitzero"`
	// Template is what machines are made from.
	Template MachineTemplateSpec `json:"template,omitempty,omitzero"`
	// MinReadySeconds is stored and shown in metrics; availability does not depend on it.
	MinReadySeconds int32 `json:"minReadySeconds,omitempty"`
	// AutoPreserveFailedMachineMax is how many Failed machines are preserved without being asked to; 0 if absent.
	AutoPreserveFailedMachineMax *int32 `json:"autoPreserveFailedMachineMax,omitempty"`
}

// MachineSetStatus is what was last seen of a set.
type MachineSetStatus struct {
	// Replicas is the number of machines there are.
	Replicas int32 `json:"replicas,omitempty"`
	// FullyLabeledReplicas is the number of machines that have all labels of the template.
	FullyLabeledReplicas int32 `json:"fullyLabeledReplicas,omitempty"`
	// ReadyReplicas is the number of machines that are Running.
	ReadyReplicas int32 `json:"readyReplicas,omitempty"`
	// AvailableReplicas is the number of machines that are Available or Running.
	AvailableReplicas int32 `json:"availableReplicas,omitempty"`
	// PreservedFailedReplicas is the number of machines that are Failed and preserved.
	PreservedFailedReplicas int32 `json:"preservedFailedReplicas,omitempty"`
	// ObservedGeneration is the generation of the spec that this status is about.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Conditions of the set. The field's name in YAML is a singular; clients rely on it.
	Conditions []MachineSetCondition `json:"machineSetCondition,omitempty"`
	// LastOperation is the last operation of the set.
	LastOperation LastOperation `json:"lastOperation,omitempty,omitzero"`
	// FailedMachines lists the machines whose last operation failed: the first 100 by name, with long texts shortened.
	FailedMachines []MachineSummary `json:"failedMachines,omitempty"`
	// FailedMachineCount is the number of machines whose last operation failed, whether or not FailedMachines lists them.
	FailedMachineCount int32 `json:"failedMachineCount,omitempty"`
	// AutoPreserveFailedMachineCount is the number of Failed machines that are preserved without being asked to.
	AutoPreserveFailedMachineCount *int32 `json:"autoPreserveFailedMachineCount,omitempty"`
}

// MachineSetConditionType names a condition of a MachineSet.
type MachineSetConditionType string

// Conditions of a MachineSet.
const (
	// MachineSetReplicaFailure is True while machines cannot be created or deleted; see ReasonFailedCreate and
	// ReasonFailedDelete.
	MachineSetReplicaFailure MachineSetConditionType = "ReplicaFailure"
	// MachineSetFrozen is True while the set has too many machines and creates no more; see ReasonOverShootingReplicaCount.
	MachineSetFrozen MachineSetConditionType = "Frozen"
)

// MachineSetCondition is one observation of a set.
type MachineSetCondition struct {
	// Type of the condition.
	Type MachineSetConditionType `json:"type"`
	// Status of the condition: True, False or Unknown.
	Status corev1.ConditionStatus `json:"status"`
	// LastTransitionTime is when the status last changed.
	LastTransitionTime metav1.Time `json:"lastTransitionTime,omitempty,omitzero"`
	// Reason for the status, in one word.
	Reason string `json:"reason,omitempty"`
	// Message explains the reason to people.
	Message string `json:"message,omitempty"`
}
