package v1alpha1

// AnnotationKeyOperation on a Machine is the journal of its operations: a JSON object that holds how many operations
// are settled; the operation in flight and when it began, if there is one; after a failure which operation failed, the
// earliest time for its next try (notBefore) and the version of the class it failed with; the provider that has the
// instance or was asked for it, and whether the create in flight is the first that it got (first); and whether the
// operation uses the class as it was last accepted (lastGood, see AnnotationKeyAccepted). The operation's id follows
// from the Machine's uid, the operation and the number settled. The journal is written before the first attempt and read
// back after a restart or a change of leader, so that an operation keeps its identity and is never started twice. It is
// an annotation and not a status field because clusters may keep CRDs that drop status fields unknown to them.
const AnnotationKeyOperation = "machinebus.io/operation"

// Annotations of MachineClasses.
const (
	// AnnotationKeyAccepted holds the fields of the class, as JSON, in the version from which its driver last made an
	// instance. A machine is deleted with it when the driver refuses the class as it stands.
	AnnotationKeyAccepted = "machinebus.io/accepted"
	// AnnotationKeyOperationTimeout is how long one attempt at creating, initializing or deleting an instance of the
	// class may take, as a Go duration; it wins over the controllers' flag.
	AnnotationKeyOperationTimeout = "machinebus.io/operation-timeout"
	// AnnotationKeyCollectOrphans with AnnotationValueTrue says that instances of the class which belong to no machine
	// may be deleted although they are most of its instances, or the class has no Machine. Otherwise it is the Machines that are thought lost.
	AnnotationKeyCollectOrphans = "machinebus.io/collect-orphans"
)

// Annotations of Machines, MachineSets and MachineDeployments.
const (
	// AnnotationKeyMachinePriority on a Machine holds an integer; lower ones are deleted earlier when a set shrinks.
	AnnotationKeyMachinePriority = "machinepriority.machine.sapcloud.io"
	// AnnotationKeyTriggerDeletion on a MachineDeployment names the machines that the cluster-autoscaler wants deleted,
	// as name~time,name~time with times in RFC 3339. An entry without a time is of an older autoscaler.
	AnnotationKeyTriggerDeletion = "node.machine.sapcloud.io/trigger-deletion-by-mcm"
	// AnnotationKeyMarkedForDeletionTime on a Machine holds its time, in RFC 3339, from AnnotationKeyTriggerDeletion.
	AnnotationKeyMarkedForDeletionTime = "machine.sapcloud.io/marked-for-deletion-time"
	// AnnotationKeyLastReplicaChangeByScaler on a MachineDeployment, and copied to its MachineSets, is when the
	// cluster-autoscaler last changed the replicas, in RFC 3339. Machines marked by then are deleted. No two changes have
	// the same, so it may have fractions of a second.
	AnnotationKeyLastReplicaChangeByScaler = "machine.sapcloud.io/last-deployment-replica-change-by-scaler-time"
	// AnnotationKeyEffectiveCreationTimeout holds a Go duration that wins over creationTimeout. It is handed down from
	// a MachineDeployment to its MachineSets and Machines.
	AnnotationKeyEffectiveCreationTimeout = "node.machine.sapcloud.io/effective-creation-timeout"
	// AnnotationKeyLastAppliedNodePreserveValue on a Machine is the value of AnnotationKeyPreserve that was last taken
	// from its Node.
	AnnotationKeyLastAppliedNodePreserveValue = "node.machine.sapcloud.io/last-applied-node-preserve-value"
	// AnnotationKeyUnfreeze on a MachineDeployment or MachineSet, whatever its value, asks to end the freeze.
	AnnotationKeyUnfreeze = "safety.machine.sapcloud.io/unfreeze"
	// AnnotationKeyRevision on a MachineDeployment or MachineSet is the number of its template's version.
	AnnotationKeyRevision = "deployment.kubernetes.io/revision"
	// AnnotationKeyRevisionHistory on a MachineSet lists earlier revisions of the same template, separated by commas.
	AnnotationKeyRevisionHistory = "deployment.kubernetes.io/revision-history"
	// AnnotationKeyDesiredReplicas on a MachineSet holds the replicas of its MachineDeployment when it was last scaled.
	AnnotationKeyDesiredReplicas = "deployment.kubernetes.io/desired-replicas"
	// AnnotationKeyMaxReplicas on a MachineSet holds the replicas of its MachineDeployment plus the surge.
	AnnotationKeyMaxReplicas = "deployment.kubernetes.io/max-replicas"
	// AnnotationKeyPreferNoSchedule on a MachineSet with "True" says that its Nodes got TaintKeyPreferNoSchedule.
	AnnotationKeyPreferNoSchedule = "deployment.machine.sapcloud.io/prefer-no-schedule"
)

// Values of AnnotationKeyMachinePriority.
const (
	// MachinePriorityDefault is written to Machines that have none.
	MachinePriorityDefault = "3"
	// MachinePriorityDelete marks a machine for deletion.
	MachinePriorityDelete = "1"
)

// AnnotationKeyPreserve on a Node or a Machine says whether the machine is kept although it Failed. On a Node it wins.
const AnnotationKeyPreserve = "node.machine.sapcloud.io/preserve"

// Values of AnnotationKeyPreserve. Others are ignored.
const (
	PreserveNow        = "now"            // in whatever phase, and after it recovered
	PreserveWhenFailed = "when-failed"    // while it is Failed
	PreserveAuto       = "auto-preserved" // set by a MachineSet, see AutoPreserveFailedMachineMax
	PreserveNever      = "false"          // neither now nor by a MachineSet
)

// Annotations of Nodes.
const (
	// AnnotationKeyUpdateFailedReason is the updating agent's explanation of LabelValueUpdateFailed.
	AnnotationKeyUpdateFailedReason = "node.machine.sapcloud.io/update-failed-reason"
	// AnnotationKeyLastAppliedNodeTemplate holds the nodeTemplate that was last applied to the Node, as JSON.
	AnnotationKeyLastAppliedNodeTemplate = "node.machine.sapcloud.io/last-applied-anno-labels-taints"
	// AnnotationKeyLastAppliedVirtualCapacity holds the virtualCapacity that was last applied to the Node, as JSON.
	AnnotationKeyLastAppliedVirtualCapacity = "node.machine.sapcloud.io/last-applied-virtual-capacity"
	// AnnotationKeyNotManaged with "1" marks a Node without a Machine.
	AnnotationKeyNotManaged = "node.machine.sapcloud.io/not-managed-by-mcm"
	// AnnotationKeyScaleDownDisabled with "true" keeps the cluster-autoscaler from removing the Node.
	AnnotationKeyScaleDownDisabled = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
	// AnnotationKeyScaleDownDisabledByMCM with "true" says that mcm may remove AnnotationKeyScaleDownDisabled.
	AnnotationKeyScaleDownDisabledByMCM = "cluster-autoscaler.kubernetes.io/scale-down-disabled-by-mcm"
)
