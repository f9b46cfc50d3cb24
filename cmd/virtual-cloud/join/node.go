package join

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// kubeletVersion is the version in Nodes; clients expect one.
const kubeletVersion = "v1.36.0"

// newNode returns the Node that an instance registers.
func newNode(i cloudapi.Instance, ready bool) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: i.NodeName, Labels: labels(i)},
		Spec:       corev1.NodeSpec{ProviderID: i.ProviderID},
		Status:     nodeStatus(i, ready),
	}
}

// labels returns the labels that a kubelet with a cloud provider sets.
func labels(i cloudapi.Instance) map[string]string {
	l := map[string]string{
		corev1.LabelHostname:           i.NodeName,
		corev1.LabelOSStable:           "linux",
		corev1.LabelArchStable:         "amd64",
		corev1.LabelInstanceTypeStable: i.MachineType,
		corev1.LabelTopologyRegion:     i.Region,
	}
	if i.Zone != "" {
		l[corev1.LabelTopologyZone] = i.Zone
	}

	return l
}

// nodeStatus returns the complete status that a kubelet writes.
func nodeStatus(i cloudapi.Instance, ready bool) corev1.NodeStatus {
	resources := corev1.ResourceList{ // one size for all machine types
		corev1.ResourceCPU:              resource.MustParse("4"),
		corev1.ResourceMemory:           resource.MustParse("16Gi"),
		corev1.ResourceEphemeralStorage: resource.MustParse("50Gi"),
		corev1.ResourcePods:             resource.MustParse("110"),
	}
	status := corev1.NodeStatus{
		Capacity: resources, Allocatable: resources,
		Conditions: []corev1.NodeCondition{
			condition(corev1.NodeMemoryPressure, corev1.ConditionFalse, "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
			condition(corev1.NodeDiskPressure, corev1.ConditionFalse, "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
			condition(corev1.NodePIDPressure, corev1.ConditionFalse, "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
			readyCondition(ready),
		},
		NodeInfo: corev1.NodeSystemInfo{
			MachineID: i.ID, SystemUUID: i.ID, BootID: i.ID,
			KernelVersion: "virtual", OSImage: "virtual", ContainerRuntimeVersion: "virtual://1",
			KubeletVersion: kubeletVersion, OperatingSystem: "linux", Architecture: "amd64",
		},
	}
	for _, a := range i.Addresses {
		status.Addresses = append(status.Addresses,
			corev1.NodeAddress{Type: corev1.NodeAddressType(a.Type), Address: a.Address})
	}

	return status
}

func readyCondition(ready bool) corev1.NodeCondition {
	if ready {
		return condition(corev1.NodeReady, corev1.ConditionTrue, "KubeletReady", "kubelet is posting ready status")
	}

	return condition(corev1.NodeReady, corev1.ConditionFalse, "KubeletNotReady", "set by the knob nodeNotReady of the virtual cloud")
}

func condition(t corev1.NodeConditionType, s corev1.ConditionStatus, reason, message string) corev1.NodeCondition {
	now := metav1.Now()

	return corev1.NodeCondition{
		Type: t, Status: s, Reason: reason, Message: message, LastHeartbeatTime: now, LastTransitionTime: now,
	}
}
