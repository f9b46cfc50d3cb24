package v1alpha1

// MachinePhase is where a machine is in its life.
type MachinePhase string

// Phases. MachinePhaseNew is what a Machine has before any controller saw it. Those of an update in place are another
// manager's: such updates are not carried out here.
const (
	MachinePhaseNew                MachinePhase = ""
	MachinePending                 MachinePhase = "Pending"                 // the instance exists, its Node has not joined
	MachineAvailable               MachinePhase = "Available"               // the instance exists, and no Node is expected: there is no target cluster
	MachineRunning                 MachinePhase = "Running"                 // the Node is healthy
	MachineUnknown                 MachinePhase = "Unknown"                 // the Node is unhealthy or missing, the health timeout runs
	MachineFailed                  MachinePhase = "Failed"                  // given up; its MachineSet replaces it unless it is preserved
	MachineCrashLoopBackOff        MachinePhase = "CrashLoopBackOff"        // the instance could not be made; it is tried again
	MachineTerminating             MachinePhase = "Terminating"             // on its way out
	MachineInPlaceUpdating         MachinePhase = "InPlaceUpdating"         // drained, the agent on the Node updates it
	MachineInPlaceUpdateSuccessful MachinePhase = "InPlaceUpdateSuccessful" // the agent reported success
	MachineInPlaceUpdateFailed     MachinePhase = "InPlaceUpdateFailed"     // the agent reported failure, or the timeout has passed
)

// MachineState is how the last operation on a machine went.
type MachineState string

// States of an operation.
const (
	MachineStateProcessing MachineState = "Processing"
	MachineStateFailed     MachineState = "Failed"
	MachineStateSuccessful MachineState = "Successful"
)

// MachineOperationType is what was last done to a machine.
type MachineOperationType string

// Types of operations.
const (
	MachineOperationCreate        MachineOperationType = "Create"
	MachineOperationInPlaceUpdate MachineOperationType = "InPlaceUpdate" // another manager's: updates in place are not carried out here
	MachineOperationHealthCheck   MachineOperationType = "HealthCheck"
	MachineOperationDelete        MachineOperationType = "Delete"
)
