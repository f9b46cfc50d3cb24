package v1alpha1

// Labels of Machines, MachineSets and MachineDeployments.
const (
	// LabelKeyNode on a Machine holds the name of its Node. It is set once the instance exists, and never when there is
	// no target cluster.
	LabelKeyNode = "node"
	// LabelKeyMachineDeployment on a Machine holds the name of its MachineDeployment. No controller sets it: it has to
	// stand in the template. The limit on simultaneous replacements, metrics and the cluster-autoscaler look for it.
	LabelKeyMachineDeployment = "name"
	// LabelKeyMachineTemplateHash on a MachineSet, in its selector and on its Machines holds the hash of the template.
	LabelKeyMachineTemplateHash = "machine-template-hash"
	// LabelKeyFreeze on a MachineSet or MachineDeployment with exactly LabelValueTrue stops the creation of machines.
	LabelKeyFreeze = "freeze"
	// LabelKeyForceDeletion on a Machine with any true value that strconv.ParseBool knows forces the drain
	// before its deletion. The instance is deleted by its driver all the same.
	LabelKeyForceDeletion = "force-deletion"
	// LabelKeyForceDrain on a Machine with exactly LabelValueTrue forces drains for an update in place and for
	// preservation.
	LabelKeyForceDrain = "force-drain"
	// LabelKeyScaleUpDisabled on a MachineSet, whatever its value, keeps it from creating machines: it is an old one in
	// an update in place.
	LabelKeyScaleUpDisabled = "node.machine.sapcloud.io/scale-up-disabled"
)

// LabelValueTrue is the value of LabelKeyFreeze and LabelKeyForceDrain. No other spelling counts.
const LabelValueTrue = "True"

// Labels of Nodes. By those of an update in place mcm ends one that another manager has started; it starts none.
const (
	// LabelKeyMachineName on a Node holds the name of its Machine.
	LabelKeyMachineName = "node.gardener.cloud/machine-name"
	// LabelKeyNodeCandidateForUpdate marks a Node that an update in place is going to reach; the value is "true".
	LabelKeyNodeCandidateForUpdate = "node.machine.sapcloud.io/candidate-for-update"
	// LabelKeyNodeSelectedForUpdate marks a Node to update in place now; the value is "true". The controllers set it,
	// or with OrchestrationTypeManual the user.
	LabelKeyNodeSelectedForUpdate = "node.machine.sapcloud.io/selected-for-update"
	// LabelKeyNodeUpdateResult is how the updating agent reports, by LabelValueUpdateSuccessful or
	// LabelValueUpdateFailed. The Machine has it too while it changes from the old MachineSet to the new one.
	LabelKeyNodeUpdateResult = "node.machine.sapcloud.io/update-result"
)

// Values of LabelKeyNodeUpdateResult.
const (
	LabelValueUpdateSuccessful = "successful"
	LabelValueUpdateFailed     = "failed"
)
