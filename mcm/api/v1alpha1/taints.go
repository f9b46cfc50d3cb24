package v1alpha1

// Taints of Nodes.
const (
	// TaintKeyPreferNoSchedule, with TaintValuePreferNoSchedule and the effect PreferNoSchedule, keeps new pods off Nodes
	// that a rollout is going to replace.
	TaintKeyPreferNoSchedule = "deployment.machine.sapcloud.io/prefer-no-schedule"
	// TaintValuePreferNoSchedule is the value of TaintKeyPreferNoSchedule.
	TaintValuePreferNoSchedule = "True"
	// TaintKeyCriticalComponentsNotReady, with the effect NoSchedule, keeps a machine Pending. It is put on a Node after
	// an update in place; mcm does not remove it.
	TaintKeyCriticalComponentsNotReady = "node.gardener.cloud/critical-components-not-ready"
	// TaintKeyPreserved, with the effect NoSchedule, keeps pods off a Failed machine that is preserved.
	TaintKeyPreserved = "node.machine.sapcloud.io/preserved"
)
