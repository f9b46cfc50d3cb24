package machine

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// applyVirtualCapacity has the status of the machine's Node show the resources
// of its class that no kubelet reports, and lose those that the class had before
// and has no more. What was applied last stands on the Node.
func (t *nodeTemplate) applyVirtualCapacity(ctx context.Context) error {
	if t.node.found == nil || !t.node.found.DeletionTimestamp.IsZero() {
		return nil
	}
	want, known, err := t.virtualCapacity(ctx)
	if err != nil || !known {
		return err
	}
	last, had := t.appliedVirtualCapacity()
	if !had && len(want) == 0 {
		return nil
	}
	node := t.node.found.DeepCopy()
	for name := range last {
		delete(node.Status.Capacity, name)
	}
	if node.Status.Capacity == nil {
		node.Status.Capacity = corev1.ResourceList{}
	}
	maps.Copy(node.Status.Capacity, want)
	if had && equality.Semantic.DeepEqual(last, want) && equality.Semantic.DeepEqual(node.Status.Capacity, t.node.found.Status.Capacity) {
		return nil
	}
	applied, err := json.Marshal(want)
	if err != nil {
		return fmt.Errorf("virtual capacity of class %s: %w", t.machine.Spec.Class.Name, err)
	}
	metav1.SetMetaDataAnnotation(&node.ObjectMeta, v1alpha1.AnnotationKeyLastAppliedVirtualCapacity, string(applied))
	err = t.target.Status().Patch(ctx, node, client.MergeFromWithOptions(t.node.found, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsInvalid(err) {
		// The class's fault, and no reason to call the machine unhealthy.
		t.warnf("InvalidField", "MachineClass %s: nodeTemplate.virtualCapacity is left out: %s", t.machine.Spec.Class.Name, fault(err))

		return nil
	}
	if err != nil {
		return fmt.Errorf("set virtual capacity of node %s: %w", node.Name, err)
	}
	t.node.found = node

	return nil
}

// appliedVirtualCapacity is what the Node was given last, as far as that can be
// read; had reports whether it was given something.
func (t *nodeTemplate) appliedVirtualCapacity() (last corev1.ResourceList, had bool) {
	text, had := t.node.found.Annotations[v1alpha1.AnnotationKeyLastAppliedVirtualCapacity]
	if !had {
		return nil, false
	}
	if err := json.Unmarshal([]byte(text), &last); err != nil {
		t.log.Info("the virtual capacity applied to the node is unreadable; none is taken away from it", "node", t.node.found.Name, "err", err.Error())

		return nil, true
	}

	return last, true
}

// virtualCapacity is that of the machine's class; not known when there is none:
// then the Node keeps what it has.
func (t *nodeTemplate) virtualCapacity(ctx context.Context) (capacity corev1.ResourceList, known bool, err error) {
	ref := t.machine.Spec.Class
	if ref.Kind != v1alpha1.KindMachineClass || ref.Name == "" {
		return nil, false, nil
	}
	class := &v1alpha1.MachineClass{}
	err = t.control.Get(ctx, client.ObjectKey{Namespace: t.machine.Namespace, Name: ref.Name}, class)
	if err != nil {
		return nil, false, client.IgnoreNotFound(err)
	}
	if class.NodeTemplate == nil {
		return nil, true, nil
	}

	return class.NodeTemplate.VirtualCapacity, true, nil
}
