package v1alpha1

// Reasons of Events on MachineSets.
const (
	EventSuccessfulCreate  = "SuccessfulCreate"
	EventFailedCreate      = "FailedCreate"
	EventSuccessfulDelete  = "SuccessfulDelete"
	EventFailedDelete      = "FailedDelete"
	EventFrozeMachineSet   = "FrozeMachineSet"
	EventUnfrozeMachineSet = "UnfrozeMachineSet"
	EventAutoPreserve      = "AutoPreserve" // the machine controller manager has none of it
)

// Reasons of Events on MachineDeployments.
const (
	EventSelectingAll                        = "SelectingAll"
	EventScalingMachineSet                   = "ScalingMachineSet"
	EventMachineSetCreateError               = "MachineSetCreateError"
	EventDeploymentRollback                  = "DeploymentRollback"
	EventDeploymentRollbackRevisionNotFound  = "DeploymentRollbackRevisionNotFound"
	EventDeploymentRollbackTemplateUnchanged = "DeploymentRollbackTemplateUnchanged"
)

// Messages of EventScalingMachineSet; they take the name of the MachineSet and its new replicas.
const (
	EventFormatScaledUp   = "Scaled up machine set %s to %d"
	EventFormatScaledDown = "Scaled down machine set %s to %d"
)
