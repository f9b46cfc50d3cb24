package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// MachineDeployment keeps a number of equal machines and replaces or updates them step by step when their template
// changes. It has one MachineSet per version of the template.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=machinedeployments,shortName=mcd,scope=Namespaced
// +kubebuilder:subresource:status
// +kubebuilder:subresource:scale:specpath=.spec.replicas,statuspath=.status.replicas
// +kubebuilder:printcolumn:name="Ready",type=integer,JSONPath=`.status.readyReplicas`,description="Number of machines whose Node is healthy"
// +kubebuilder:printcolumn:name="Desired",type=integer,JSONPath=`.spec.replicas`,description="Desired number of machines"
// +kubebuilder:printcolumn:name="Up-to-date",type=integer,JSONPath=`.status.updatedReplicas`,description="Number of machines of the latest template"
// +kubebuilder:printcolumn:name="Available",type=integer,JSONPath=`.status.availableReplicas`,description="Number of machines that can be worked with"
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`,description="Time since the object was created"
// +kubebuilder:printcolumn:name="Class",type=string,priority=1,JSONPath=`.spec.template.spec.class.name`,description="Class that machines are made from"
// +kubebuilder:printcolumn:name="Paused",type=boolean,priority=1,JSONPath=`.spec.paused`,description="Whether changes of the template are held back"
// +kubebuilder:printcolumn:name="Frozen",type=string,priority=1,JSONPath=`.metadata.labels.freeze`,description="True while no machines are made because there are too many"
// +kubebuilder:printcolumn:name="Failure",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="ReplicaFailure")].message`,description="Why machines cannot be created or deleted"
// +kubebuilder:printcolumn:name="Progress",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Progressing")].reason`,description="How the rollout goes"
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Progressing")].message`,description="What it waits for, with the machine that holds it up"
type MachineDeployment struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty,omitzero"`

	// Spec is what the deployment is to be.
	Spec MachineDeploymentSpec `json:"spec,omitempty,omitzero"`
	// Status is what was last seen of the deployment; the controllers write it.
	Status MachineDeploymentStatus `json:"status,omitempty,omitzero"`
}

// MachineDeploymentList is a list of MachineDeployments.
//
// +kubebuilder:object:root=true
type MachineDeploymentList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []MachineDeployment `json:"items"`
}

// MachineDeploymentSpec is what a deployment is to be.
type MachineDeploymentSpec struct {
	// Replicas is the number of machines to keep; 0 if absent, unlike a Deployment of pods.
	Replicas int32 `json:"replicas,omitempty"`
	// Selector finds the machines of the deployment by their labels. The template's labels have to match it.
	Selector *metav1.LabelSelector `json:"selector,omitempty"`
	// Template is what machines are made from.
	Template MachineTemplateSpec `json:"template"`
	// Strategy says how machines follow a change of the template.
	//
	// +kubebuilder:validation:XValidation:rule="!has(self.type) || self.type != 'RollingUpdate' || has(self.rollingUpdate) && has(self.rollingUpdate.maxUnavailable) && has(self.rollingUpdate.maxSurge)",message="type RollingUpdate needs limits: set rollingUpdate.maxUnavailable and rollingUpdate.maxSurge"
	// +kubebuilder:validation:XValidation:rule="!has(self.type) || self.type != 'InPlaceUpdate' || has(self.inPlaceUpdate) && has(self.inPlaceUpdate.maxUnavailable) && has(self.inPlaceUpdate.maxSurge)",message="type InPlaceUpdate needs limits: set inPlaceUpdate.maxUnavailable and inPlaceUpdate.maxSurge"
	Strategy MachineDeploymentStrategy `json:"strategy,omitempty,omitzero"`
	// MinReadySeconds is stored and shown in metrics; availability does not depend on it.
	MinReadySeconds int32 `json:"minReadySeconds,omitempty"`
	// RevisionHistoryLimit is how many old MachineSets are kept to roll back to, those of the latest revisions; all if
	// absent.
	//
	// +kubebuilder:validation:XValidation:rule="self >= 0",message="is negative: set 0 or more, or leave it out to keep all"
	RevisionHistoryLimit *int32 `json:"revisionHistoryLimit,omitempty"`
	// Paused holds back changes of the template. Scaling goes on.
	Paused bool `json:"paused,omitempty"`
	// RollbackTo asks to go back to an earlier template, whether or not there is one; it is removed in any case. Better
	// apply the earlier template.
	RollbackTo *RollbackConfig `json:"rollbackTo,omitempty"`
	// ProgressDeadlineSeconds is how long a rollout may stand still before the condition Progressing turns False; no
	// limit if absent.
	//
	// +kubebuilder:validation:XValidation:rule="self >= 0",message="is negative: set 0 or more, or leave it out for no limit"
	ProgressDeadlineSeconds *int32 `json:"progressDeadlineSeconds,omitempty"`
	// AutoPreserveFailedMachineMax is how many Failed machines of the latest MachineSet are preserved without being
	// asked to; 0 if absent.
	AutoPreserveFailedMachineMax *int32 `json:"autoPreserveFailedMachineMax,omitempty"`
}

// MachineDeploymentStrategyType names a way for machines to follow a change of the template.
type MachineDeploymentStrategyType string

// Strategies.
const (
	// RecreateMachineDeploymentStrategyType deletes all old machines before it makes new ones.
	RecreateMachineDeploymentStrategyType MachineDeploymentStrategyType = "Recreate"
	// RollingUpdateMachineDeploymentStrategyType replaces old machines by new ones a few at a time.
	RollingUpdateMachineDeploymentStrategyType MachineDeploymentStrategyType = "RollingUpdate"
	// InPlaceUpdateMachineDeploymentStrategyType drains machines a few at a time and has them updated by an agent on
	// the Node.
	InPlaceUpdateMachineDeploymentStrategyType MachineDeploymentStrategyType = "InPlaceUpdate"
)

// MachineDeploymentStrategy says how machines follow a change of the template.
type MachineDeploymentStrategy struct {
	// Type is RollingUpdate, Recreate or InPlaceUpdate. It has to be set.
	//
	// +kubebuilder:validation:XValidation:rule="self in ['', 'RollingUpdate', 'Recreate', 'InPlaceUpdate']",message="is no strategy: set RollingUpdate, Recreate or InPlaceUpdate"
	Type MachineDeploymentStrategyType `json:"type,omitempty"`
	// RollingUpdate has to be set if the type is RollingUpdate.
	RollingUpdate *RollingUpdateMachineDeployment `json:"rollingUpdate,omitempty"`
	// InPlaceUpdate has to be set if the type is InPlaceUpdate.
	InPlaceUpdate *InPlaceUpdateMachineDeployment `json:"inPlaceUpdate,omitempty"`
}

// UpdateConfiguration bounds how many machines change at once.
type UpdateConfiguration struct {
	// MaxUnavailable is how many machines may be unavailable during the update: a number, or a percentage of the
	// replicas, rounded down.
	//
	// +kubebuilder:validation:XValidation:rule="type(self) == int ? self >= 0 : self.matches('^[0-9]+%$')",message="is no amount: set a number such as 1, or a percentage such as 25%"
	MaxUnavailable *intstr.IntOrString `json:"maxUnavailable,omitempty"`
	// MaxSurge is how many machines there may be beyond the replicas during the update: a number, or a percentage of
	// the replicas, rounded up.
	//
	// +kubebuilder:validation:XValidation:rule="type(self) == int ? self >= 0 : self.matches('^[0-9]+%$')",message="is no amount: set a number such as 1, or a percentage such as 25%"
	MaxSurge *intstr.IntOrString `json:"maxSurge,omitempty"`
}

// RollingUpdateMachineDeployment configures the strategy RollingUpdate.
type RollingUpdateMachineDeployment struct {
	UpdateConfiguration `json:",inline"`
}

// OrchestrationType says who selects the machines for an update in place.
type OrchestrationType string

// Orchestrations.
const (
	// OrchestrationTypeAuto lets the controllers select machines within the limits.
	OrchestrationTypeAuto OrchestrationType = "Auto"
	// OrchestrationTypeManual waits until a person or program selects Nodes by LabelKeyNodeSelectedForUpdate.
	OrchestrationTypeManual OrchestrationType = "Manual"
)

// InPlaceUpdateMachineDeployment configures the strategy InPlaceUpdate.
type InPlaceUpdateMachineDeployment struct {
	UpdateConfiguration `json:",inline"`

	// OrchestrationType says who selects the machines to update: Auto for the controllers, Manual for the user.
	//
	// +kubebuilder:validation:XValidation:rule="self in ['', 'Auto', 'Manual']",message="is no orchestration: set Auto or Manual"
	OrchestrationType OrchestrationType `json:"orchestrationType,omitempty"`
}

// RollbackConfig names an earlier template.
type RollbackConfig struct {
	// Revision to go back to; 0 for the last one before the current.
	Revision int64 `json:"revision,omitempty"`
}

// MachineDeploymentStatus is what was last seen of a deployment.
type MachineDeploymentStatus struct {
	// ObservedGeneration is the generation of the spec that this status is about.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Replicas is the number of machines there are, those that are being deleted included.
	Replicas int32 `json:"replicas,omitempty"`
	// UpdatedReplicas is the number of machines of the latest template.
	UpdatedReplicas int32 `json:"updatedReplicas,omitempty"`
	// ReadyReplicas is the number of machines that are Running.
	ReadyReplicas int32 `json:"readyReplicas,omitempty"`
	// AvailableReplicas is the number of machines that are Available or Running.
	AvailableReplicas int32 `json:"availableReplicas,omitempty"`
	// PreservedFailedReplicas is the number of machines that are Failed and preserved.
	PreservedFailedReplicas int32 `json:"preservedFailedReplicas,omitempty"`
	// UnavailableReplicas is the number of machines that the MachineSets still lack to be fully available.
	UnavailableReplicas int32 `json:"unavailableReplicas,omitempty"`
	// Conditions of the deployment.
	Conditions []MachineDeploymentCondition `json:"conditions,omitempty"`
	// CollisionCount makes the name of the next MachineSet differ from one that is taken.
	CollisionCount *int32 `json:"collisionCount,omitempty"`
	// FailedMachines lists the machines of all MachineSets whose last operation failed: 100 at most, those of the latest
	// MachineSet first.
	FailedMachines []MachineSummary `json:"failedMachines,omitempty"`
	// FailedMachineCount is the number of machines whose last operation failed, whether or not FailedMachines lists them.
	FailedMachineCount int32 `json:"failedMachineCount,omitempty"`
}

// MachineDeploymentConditionType names a condition of a MachineDeployment.
type MachineDeploymentConditionType string

// Conditions of a MachineDeployment.
const (
	// MachineDeploymentAvailable is True while enough machines are available.
	MachineDeploymentAvailable MachineDeploymentConditionType = "Available"
	// MachineDeploymentProgressing shows the progress of a rollout.
	MachineDeploymentProgressing MachineDeploymentConditionType = "Progressing"
	// MachineDeploymentReplicaFailure is copied from a MachineSet.
	MachineDeploymentReplicaFailure MachineDeploymentConditionType = "ReplicaFailure"
	// MachineDeploymentFrozen is True while a MachineSet has too many machines and none creates more.
	MachineDeploymentFrozen MachineDeploymentConditionType = "Frozen"
)

// MachineDeploymentCondition is one observation of a deployment.
type MachineDeploymentCondition struct {
	// Type of the condition.
	Type MachineDeploymentConditionType `json:"type"`
	// Status of the condition: True, False or Unknown.
	Status corev1.ConditionStatus `json:"status"`
	// LastUpdateTime is when the condition was last written.
	LastUpdateTime metav1.Time `json:"lastUpdateTime,omitempty,omitzero"`
	// LastTransitionTime is when the status last changed.
	LastTransitionTime metav1.Time `json:"lastTransitionTime,omitempty,omitzero"`
	// Reason for the status, in one word.
	Reason string `json:"reason,omitempty"`
	// Message explains the reason to people.
	Message string `json:"message,omitempty"`
}
