package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Machine is the wish for one instance at a provider and, once it has joined, for the Node that runs on it.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=machines,shortName=mc,scope=Namespaced
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Status",type=string,JSONPath=`.status.currentStatus.phase`,description="Phase of the machine"
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`,description="Time since the object was created"
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.metadata.labels.node`,description="Node that runs on the machine"
// +kubebuilder:printcolumn:name="ProviderID",type=string,priority=1,JSONPath=`.spec.providerID`,description="ID of the instance at the provider"
// +kubebuilder:printcolumn:name="Class",type=string,priority=1,JSONPath=`.spec.class.name`,description="Class that the instance is made from"
// +kubebuilder:printcolumn:name="Operation",type=string,priority=1,JSONPath=`.status.lastOperation.type`,description="What was last done to the machine"
// +kubebuilder:printcolumn:name="State",type=string,priority=1,JSONPath=`.status.lastOperation.state`,description="How that went"
// +kubebuilder:printcolumn:name="Code",type=string,priority=1,JSONPath=`.status.lastOperation.errorCode`,description="Code of the driver's error, if it failed"
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.lastOperation.description`,description="What the machine waits for, or why it failed"
type Machine struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// Spec is what the machine is to be.
	Spec MachineSpec `json:"spec,omitempty,omitzero"`
	// Status is what was last seen of the machine; the controllers write it.
	Status MachineStatus `json:"status,omitempty,omitzero"`
}

// MachineList is a list of Machines.
//
// +kubebuilder:object:root=true
type MachineList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []Machine `json:"items"`
}

// MachineSpec is what a machine is to be.
type MachineSpec struct {
	// Class names the MachineClass that the instance is made from.
	//
	// +kubebuilder:validation:XValidation:rule="(has(self.kind) && self.kind != '') == (has(self.name) && self.name != '')",message="kind and name belong together: set kind to MachineClass and name to the name of one"
	Class ClassSpec `json:"class,omitempty,omitzero"`
	// ProviderID identifies the instance at the provider. It is written after the creation; preset it to adopt an
	// instance that exists.
	ProviderID string `json:"providerID,omitempty"`
	// NodeTemplateSpec holds the labels, annotations and taints to keep on the machine's Node.
	NodeTemplateSpec NodeTemplateSpec `json:"nodeTemplate,omitempty,omitzero"`
	// MachineConfiguration overrides the controllers' settings for this machine. Its fields stand in the spec itself.
	// (It is embedded by value, so that an unset field is nil and reading it does not crash.)
	MachineConfiguration `json:",inline"`
}

// ClassSpec refers to a MachineClass in the namespace of the object that holds the reference.
type ClassSpec struct {
	// APIGroup of the class; not evaluated.
	APIGroup string `json:"apiGroup,omitempty"`
	// Kind of the class; has to be MachineClass.
	Kind string `json:"kind,omitempty"`
	// Name of the class.
	Name string `json:"name,omitempty"`
}

// NodeTemplateSpec is what the controllers keep in sync on the Node of a machine.
type NodeTemplateSpec struct {
	// Labels and annotations are kept on the Node. The other fields have no effect.
	//
	// +kubebuilder:pruning:PreserveUnknownFields
	metav1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// Spec holds the taints to keep on the Node. The other fields have no effect.
	Spec corev1.NodeSpec `json:"spec,omitempty,omitzero"`
}

// MachineConfiguration holds the settings that a machine may override. A field that is absent takes the value of the
// controllers' flag.
type MachineConfiguration struct {
	// MachineDrainTimeout is how long a drain may take before the machine is deleted by force.
	//
	// +kubebuilder:validation:XValidation:rule=`self.matches('^[-+]?(([0-9]+([.][0-9]*)?|[.][0-9]+)(ns|us|µs|ms|s|m|h))+$|^[-+]?0$') && duration(self) == duration(self)`,message="is no duration: write it with units, such as 90s, 20m or 1h30m"
	MachineDrainTimeout *metav1.Duration `json:"drainTimeout,omitempty"`
	// MachineHealthTimeout is how long a machine may be unhealthy before it is Failed.
	//
	// +kubebuilder:validation:XValidation:rule=`self.matches('^[-+]?(([0-9]+([.][0-9]*)?|[.][0-9]+)(ns|us|µs|ms|s|m|h))+$|^[-+]?0$') && duration(self) == duration(self)`,message="is no duration: write it with units, such as 90s, 20m or 1h30m"
	MachineHealthTimeout *metav1.Duration `json:"healthTimeout,omitempty"`
	// MachineCreationTimeout is how long a machine may take from its creation to joining the cluster before it is Failed.
	//
	// +kubebuilder:validation:XValidation:rule=`self.matches('^[-+]?(([0-9]+([.][0-9]*)?|[.][0-9]+)(ns|us|µs|ms|s|m|h))+$|^[-+]?0$') && duration(self) == duration(self)`,message="is no duration: write it with units, such as 90s, 20m or 1h30m"
	MachineCreationTimeout *metav1.Duration `json:"creationTimeout,omitempty"`
	// MachineInPlaceUpdateTimeout is how long an update in place may take before it counts as failed.
	//
	// +kubebuilder:validation:XValidation:rule=`self.matches('^[-+]?(([0-9]+([.][0-9]*)?|[.][0-9]+)(ns|us|µs|ms|s|m|h))+$|^[-+]?0$') && duration(self) == duration(self)`,message="is no duration: write it with units, such as 90s, 20m or 1h30m"
	MachineInPlaceUpdateTimeout *metav1.Duration `json:"inPlaceUpdateTimeout,omitempty"`
	// MachinePreserveTimeout is how long a preserved machine is kept.
	//
	// +kubebuilder:validation:XValidation:rule=`self.matches('^[-+]?(([0-9]+([.][0-9]*)?|[.][0-9]+)(ns|us|µs|ms|s|m|h))+$|^[-+]?0$') && duration(self) == duration(self)`,message="is no duration: write it with units, such as 90s, 20m or 1h30m"
	MachinePreserveTimeout *metav1.Duration `json:"machinePreserveTimeout,omitempty"`
	// DisableHealthTimeout keeps an unhealthy machine, and one whose update in place failed, from ever becoming Failed.
	DisableHealthTimeout *bool `json:"disableHealthTimeout,omitempty"`
	// MaxEvictRetries is how often the eviction of a pod is tried before the pod is deleted by force.
	//
	// +kubebuilder:validation:XValidation:rule="self >= 0",message="is negative: set 0 or more, or leave it out for the controllers' setting"
	MaxEvictRetries *int32 `json:"maxEvictRetries,omitempty"`
	// NodeConditions is a comma-separated list of the Node condition types that make a machine unhealthy unless they
	// are False.
	NodeConditions *string `json:"nodeConditions,omitempty"`
}

// MachineTemplateSpec is what a MachineSet or a MachineDeployment makes its machines from.
type MachineTemplateSpec struct {
	// Labels, annotations and finalizers that the machines get.
	//
	// +kubebuilder:pruning:PreserveUnknownFields
	metav1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// Spec of the machines.
	Spec MachineSpec `json:"spec,omitempty,omitzero"`
}

// MachineStatus is what was last seen of a machine.
type MachineStatus struct {
	// Addresses of the instance. They are set only when the controllers run without a target cluster.
	Addresses []corev1.NodeAddress `json:"addresses,omitempty"`
	// Conditions are those of the Node, copied when one changes; a new heartbeat alone is not copied.
	Conditions []corev1.NodeCondition `json:"conditions,omitempty"`
	// LastOperation is the last operation on the machine.
	LastOperation LastOperation `json:"lastOperation,omitempty,omitzero"`
	// CurrentStatus holds the phase of the machine.
	CurrentStatus CurrentStatus `json:"currentStatus,omitempty,omitzero"`
	// LastKnownState is a text that the driver returned and gets back with the next operation. Only the driver
	// understands it.
	LastKnownState string `json:"lastKnownState,omitempty"`
}

// CurrentStatus is the phase of a machine and what belongs to it.
type CurrentStatus struct {
	// Phase of the machine; empty for a machine that nothing was done for yet.
	Phase MachinePhase `json:"phase,omitempty"`
	// TimeoutActive is true while the machine is Pending.
	TimeoutActive bool `json:"timeoutActive,omitempty"`
	// LastUpdateTime is when the phase was set. The health and in-place-update timeouts count from it.
	LastUpdateTime metav1.Time `json:"lastUpdateTime,omitempty,omitzero"`
	// PreserveExpiryTime is until when the machine is preserved; absent when it is not.
	PreserveExpiryTime *metav1.Time `json:"preserveExpiryTime,omitempty"`
}

// LastOperation is the last operation on a machine and its result.
type LastOperation struct {
	// Description for people, and for programs that match the texts of this package.
	Description string `json:"description,omitempty"`
	// ErrorCode is the name of the driver's error code if the instance could not be created or initialized, such as
	// ResourceExhausted.
	ErrorCode string `json:"errorCode,omitempty"`
	// LastUpdateTime is when this was written.
	LastUpdateTime metav1.Time `json:"lastUpdateTime,omitempty,omitzero"`
	// State of the operation.
	State MachineState `json:"state,omitempty"`
	// Type of the operation.
	Type MachineOperationType `json:"type,omitempty"`
}

// MachineSummary describes a machine whose last operation failed.
type MachineSummary struct {
	// Name of the Machine.
	Name string `json:"name,omitempty"`
	// ProviderID of the instance, if there is one.
	ProviderID string `json:"providerID,omitempty"`
	// LastOperation of the machine.
	LastOperation LastOperation `json:"lastOperation,omitempty,omitzero"`
	// OwnerRef is the name of the object that controls the machine.
	OwnerRef string `json:"ownerRef,omitempty"`
}
