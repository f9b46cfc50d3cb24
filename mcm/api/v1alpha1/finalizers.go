package v1alpha1

// Finalizers.
const (
	// FinalizerName keeps Machines, MachineSets, MachineDeployments and MachineClasses until what they stand for is gone.
	FinalizerName = "machine.sapcloud.io/machine-controller-manager"
	// FinalizerNameSecret keeps Secrets that a MachineClass refers to.
	FinalizerNameSecret = "machine.sapcloud.io/machine-controller"
	// FinalizerNameNode keeps the Node of a live machine until the machine was drained and its instance deleted.
	FinalizerNameNode = "node.machine.sapcloud.io/machine-controller"
)
