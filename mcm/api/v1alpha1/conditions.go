package v1alpha1

import corev1 "k8s.io/api/core/v1"

// Reasons of MachineSetReplicaFailure; ReasonInvalidSpec is another one.
const (
	ReasonFailedCreate = "FailedCreate"
	ReasonFailedDelete = "FailedDelete"
)

// Reasons of MachineSetFrozen and MachineDeploymentFrozen.
const (
	ReasonOverShootingReplicaCount   = "OverShootingReplicaCount"   // there are too many machines
	ReasonMachineDeploymentStateSync = "MachineDeploymentStateSync" // follows the MachineSets
)

// Reasons of MachineDeploymentAvailable, and the message of the first.
const (
	ReasonMinimumReplicasAvailable   = "MinimumReplicasAvailable"
	ReasonMinimumReplicasUnavailable = "MinimumReplicasUnavailable"
	MessageMinimumReplicasAvailable  = "Deployment has minimum availability."
)

// MessageLastError stands between what MachineDeploymentProgressing says of the
// rollout and an error that kept the controller from going on with it.
const MessageLastError = " The last attempt met an error: "

// Reasons of MachineDeploymentProgressing, with the status that goes with each. The cluster-autoscaler looks for
// NewMachineSetAvailable and DeploymentPaused to see whether a rollout is in progress.
const (
	ReasonNewMachineSetCreated     = "NewMachineSetCreated"     // True
	ReasonFoundNewMachineSet       = "FoundNewMachineSet"       // True
	ReasonMachineSetUpdated        = "MachineSetUpdated"        // True
	ReasonNewMachineSetAvailable   = "NewMachineSetAvailable"   // True
	ReasonMachineSetCreateError    = "MachineSetCreateError"    // False
	ReasonProgressDeadlineExceeded = "ProgressDeadlineExceeded" // False
	ReasonInvalidSpec              = "InvalidSpec"              // False; not known to the machine controller manager
	ReasonDeploymentPaused         = "DeploymentPaused"         // Unknown
	ReasonDeploymentResumed        = "DeploymentResumed"        // Unknown
)

// Conditions that controllers write on Nodes; NodeInPlaceUpdate is another manager's, see its reasons.
const (
	NodeTerminating   corev1.NodeConditionType = "Terminating"
	NodeInPlaceUpdate corev1.NodeConditionType = "InPlaceUpdate"
	NodePreserved     corev1.NodeConditionType = "Preserved"
)

// Reasons of NodeTerminating and their messages.
const (
	ReasonUnhealthy  = "Unhealthy" // the machine was Failed
	ReasonScaleDown  = "ScaleDown"
	MessageUnhealthy = "Machine Controller is terminating failed machine"
	MessageScaleDown = "Machine Controller is scaling down machine"
)

// Reasons of NodeInPlaceUpdate, in the order of an update. They are not used, as updates in place are not carried out.
const (
	ReasonCandidateForUpdate = "CandidateForUpdate"
	ReasonSelectedForUpdate  = "SelectedForUpdate"
	ReasonDrainSuccessful    = "DrainSuccessful"
	ReasonReadyForUpdate     = "ReadyForUpdate"
	ReasonUpdateSuccessful   = "UpdateSuccessful"
	ReasonUpdateFailed       = "UpdateFailed"
)

// Reasons of NodePreserved. They are sentences; clients rely on that.
const (
	ReasonPreservedByMCM      = "Preserved by MCM."
	ReasonPreservedByUser     = "Preserved by user."
	ReasonPreservationStopped = "Preservation stopped."
)

// Beginnings of the message of NodePreserved. MessageFormatPreservedUntil follows them and takes the time.
const (
	MessagePreservedDrained     = "Preserved node drained successfully."
	MessagePreservedNotDrained  = "Preserved node could not be drained."
	MessageFormatPreservedUntil = "Machine preserved until %v."
)
