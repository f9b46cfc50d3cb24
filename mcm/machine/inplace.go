package machine

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// followUpdate ends an update in place that another manager has started: mcm starts none. The
// agent on the Node reports the result as a label of the Node. An update without a result fails
// in the end, and the machine is replaced like one that is unhealthy for too long.
func (h *health) followUpdate(ctx context.Context) (steps.Next, error) {
	phase, result := h.machine.Status.CurrentStatus.Phase, ""
	if h.node.found != nil {
		result = h.node.found.Labels[v1alpha1.LabelKeyNodeUpdateResult]
	}
	switch {
	case result == v1alpha1.LabelValueUpdateSuccessful:
		return h.updateSucceeded(ctx)
	case phase == v1alpha1.MachineInPlaceUpdateFailed:
		return h.awaitRecovery(ctx)
	case result == v1alpha1.LabelValueUpdateFailed:
		return h.updateFailed(fmt.Sprintf(v1alpha1.TextFormatUpdateFailed, h.machine.Name, h.node.found.Annotations[v1alpha1.AnnotationKeyUpdateFailedReason])), nil
	}
	limit := h.settings.InPlaceUpdateTimeout
	if d := h.machine.Spec.MachineInPlaceUpdateTimeout; d != nil {
		limit = d.Duration
	}
	if left := limit - h.now.Sub(h.machine.Status.CurrentStatus.LastUpdateTime.Time); left > 0 {
		return steps.Again(left), nil
	}

	return h.updateFailed(fmt.Sprintf(v1alpha1.TextFormatUpdateTimeout, h.machine.Name, limit)), nil
}

// dropUnstartedUpdate uncordons the Node of a Running machine that another manager had cordoned and
// drained for an update in place, which has not started: the agent waits for that manager's word.
func (h *health) dropUnstartedUpdate(ctx context.Context) error {
	node := h.node.found
	if h.machine.Status.CurrentStatus.Phase != v1alpha1.MachineRunning || node == nil || !node.Spec.Unschedulable ||
		node.Labels[v1alpha1.LabelKeyNodeSelectedForUpdate] == "" {
		return nil
	}
	selected := slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == v1alpha1.NodeInPlaceUpdate && c.Reason == v1alpha1.ReasonSelectedForUpdate
	})
	if !selected {
		return nil
	}
	h.warnAfterWritef("InPlaceUpdateDropped", "Node %s was cordoned for an update in place, which mcm does not carry out: it is uncordoned", node.Name)

	return h.node.changeNode(ctx, func(n *corev1.Node) {
		n.Spec.Unschedulable = false
		delete(n.Labels, v1alpha1.LabelKeyNodeSelectedForUpdate) // else a later cordon would be undone, too
	})
}

// updateSucceeded also uncordons the Node, which was cordoned for the update.
func (h *health) updateSucceeded(ctx context.Context) (steps.Next, error) {
	if h.node.found.Labels[v1alpha1.LabelKeyNodeSelectedForUpdate] != "" {
		if err := h.node.changeNode(ctx, func(n *corev1.Node) { n.Spec.Unschedulable = false }); err != nil {
			return steps.Wait, err
		}
	}
	text := fmt.Sprintf(v1alpha1.TextFormatUpdated, h.machine.Name)
	h.setPhase(v1alpha1.MachineInPlaceUpdateSuccessful)
	h.setLastOperation(v1alpha1.MachineOperationInPlaceUpdate, v1alpha1.MachineStateSuccessful, "", text)
	h.sayAfterWritef("InPlaceUpdated", "%s", text)

	return steps.Again(time.Millisecond), nil // the Node's health decides now
}

func (h *health) updateFailed(text string) steps.Next {
	h.setPhase(v1alpha1.MachineInPlaceUpdateFailed)
	h.setLastOperation(v1alpha1.MachineOperationInPlaceUpdate, v1alpha1.MachineStateFailed, "", text)
	h.warnAfterWritef("FailedInPlaceUpdate", "%s", text)

	return steps.Again(h.healthTimeout())
}
