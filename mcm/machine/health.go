package machine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// health makes the phase of a machine follow the health of its Node.
type health struct {
	*object
	class       *machineClass
	node        *machineNode
	template    *nodeTemplate
	token       *joinToken
	replacement *replacement
	target      client.Client // nil without a target cluster
	timings     *timings
}

// followNode makes the machine's phase follow its Node: Running while that is
// healthy, Unknown while it is not, Failed when it was unhealthy for too long or never
// joined.
func (h *health) followNode(ctx context.Context) (steps.Next, error) {
	if h.target == nil || h.machine.Labels[v1alpha1.LabelKeyNode] == "" {
		return steps.Wait, nil
	}
	if err := h.node.lookupNode(ctx); err != nil {
		return steps.Wait, err
	}
	if h.node.found != nil && !h.node.found.DeletionTimestamp.IsZero() && h.node.found.Labels[v1alpha1.LabelKeyMachineName] == h.machine.Name {
		return h.followNodeOut(ctx)
	}
	if err := h.template.claimNode(ctx); err != nil {
		return steps.Wait, err
	}
	if err := h.template.applyVirtualCapacity(ctx); err != nil {
		return steps.Wait, err
	}
	healthy, text := h.node.nodeHealth()
	unspent, err := h.token.spendToken(ctx)
	if err != nil {
		return steps.Wait, err
	}
	h.copyConditions()
	n, err := h.followHealth(ctx, healthy, text)
	if err != nil {
		return steps.Wait, err
	}

	return n, errors.Join(h.patchStatus(ctx), unspent)
}

// followHealth sets the phase that the Node's health leads to.
func (h *health) followHealth(ctx context.Context, healthy bool, text string) (steps.Next, error) {
	if err := h.dropUnstartedUpdate(ctx); err != nil {
		return steps.Wait, err
	}
	switch phase := h.machine.Status.CurrentStatus.Phase; {
	case phase == v1alpha1.MachineInPlaceUpdating, phase == v1alpha1.MachineInPlaceUpdateFailed:
		return h.followUpdate(ctx)
	case phase == v1alpha1.MachinePending && (!healthy || h.node.lacksComponents()):
		return h.awaitJoin(ctx)
	case healthy && phase != v1alpha1.MachineRunning:
		return h.markRunning(ctx), nil
	case (phase == v1alpha1.MachineRunning || phase == v1alpha1.MachineInPlaceUpdateSuccessful) && !healthy:
		return h.markUnknown(text), nil
	case phase == v1alpha1.MachineUnknown:
		return h.awaitRecovery(ctx)
	default:
		return steps.Wait, nil
	}
}

// followNodeOut deletes a machine whose Node is being deleted: the Node's finalizer
// waits for that.
func (h *health) followNodeOut(ctx context.Context) (steps.Next, error) {
	h.warnf("NodeDeleted", "Node %s is being deleted; its machine follows", h.node.found.Name)
	err := h.control.Delete(ctx, h.machine, client.Preconditions{UID: uidOf(h.machine)})
	if err != nil {
		return steps.Wait, fmt.Errorf("delete machine %s/%s: %w", h.machine.Namespace, h.machine.Name, err)
	}

	return steps.Wait, nil
}

// copyConditions copies the Node's conditions when more than a heartbeat
// changed.
func (h *health) copyConditions() {
	if h.node.found == nil || sameConditions(h.machine.Status.Conditions, h.node.found.Status.Conditions) {
		return
	}
	h.machine.Status.Conditions = slices.Clone(h.node.found.Status.Conditions)
}

func sameConditions(a, b []corev1.NodeCondition) bool {
	return slices.EqualFunc(a, b, func(x, y corev1.NodeCondition) bool {
		return x.Type == y.Type && x.Status == y.Status && x.Reason == y.Reason && x.Message == y.Message
	})
}

// markRunning makes a machine with a healthy Node Running.
func (h *health) markRunning(ctx context.Context) steps.Next {
	name, last := h.machine.Name, h.machine.Status.LastOperation
	h.setPhase(v1alpha1.MachineRunning)
	if last.Type == v1alpha1.MachineOperationCreate && last.State != v1alpha1.MachineStateSuccessful {
		text := fmt.Sprintf(v1alpha1.TextFormatJoined, name, h.age().Round(time.Second))
		h.setLastOperation(v1alpha1.MachineOperationCreate, v1alpha1.MachineStateSuccessful, "", text)
		h.sayAfterWritef("Joined", "%s as node %s", text, h.node.found.Name)
		h.notes = append(h.notes, func() { h.timings.observe(h.class.metricsKind(ctx), stageJoin, h.age()) })
	} else {
		text := fmt.Sprintf(v1alpha1.TextFormatRejoined, name)
		h.setLastOperation(v1alpha1.MachineOperationHealthCheck, v1alpha1.MachineStateSuccessful, "", text)
		h.sayAfterWritef("Rejoined", "%s", text)
	}

	return steps.Wait
}

func (h *health) awaitJoin(ctx context.Context) (steps.Next, error) {
	limit := h.creationTimeout()
	if left := limit - h.age(); left > 0 {
		return steps.Again(left), nil
	}
	if bad, err := h.node.reallyUnhealthy(ctx); !bad || err != nil {
		return steps.Again(h.settings.Retry.Short), err
	}
	text := fmt.Sprintf(v1alpha1.TextFormatFailedToJoin, h.machine.Name, limit.Minutes())
	h.setPhase(v1alpha1.MachineFailed)
	h.setLastOperation(h.machine.Status.LastOperation.Type, v1alpha1.MachineStateFailed, "", text)
	h.warnAfterWritef("FailedToJoin", "%s", text)
	h.notes = append(h.notes, func() { h.timings.failedToJoin(h.class.metricsKind(ctx)) })

	return steps.Wait, nil
}

func (h *health) markUnknown(text string) steps.Next {
	if h.node.found == nil && len(h.machine.Status.Conditions) == 0 {
		return steps.Wait // never seen: nothing got worse
	}
	description := fmt.Sprintf(v1alpha1.TextFormatUnhealthy, h.machine.Name, text)
	h.setPhase(v1alpha1.MachineUnknown)
	h.setLastOperation(v1alpha1.MachineOperationHealthCheck, v1alpha1.MachineStateProcessing, "", description)
	h.warnAfterWritef("Unhealthy", "Node %s: %s", h.machine.Labels[v1alpha1.LabelKeyNode], text)

	return steps.Again(h.healthTimeout())
}

func (h *health) awaitRecovery(ctx context.Context) (steps.Next, error) {
	if off := h.machine.Spec.DisableHealthTimeout; off != nil && *off {
		return steps.Wait, nil
	}
	limit := h.healthTimeout()
	since := h.now.Sub(h.machine.Status.CurrentStatus.LastUpdateTime.Time)
	if left := limit - since; left > 0 {
		return steps.Again(left), nil
	}
	if may, err := h.replacement.mayFail(ctx, limit); !may || err != nil {
		return steps.Again(h.settings.Retry.Short), err
	}
	// How much an update in place has broken is not known: the Node may be ready all the same.
	failedUpdate := h.machine.Status.CurrentStatus.Phase == v1alpha1.MachineInPlaceUpdateFailed
	if bad, err := h.node.reallyUnhealthy(ctx); !failedUpdate && !bad || err != nil {
		h.replacement.replacements.release(h.machine.UID)

		return steps.Again(h.settings.Retry.Short), err
	}
	text := fmt.Sprintf("Machine %s %s %s", h.machine.Name, v1alpha1.TextHealthFailing, limit)
	h.setPhase(v1alpha1.MachineFailed)
	h.setLastOperation(h.machine.Status.LastOperation.Type, v1alpha1.MachineStateFailed, "", text)
	h.warnAfterWritef("HealthTimeout", "%s", text)

	return steps.Wait, nil
}

func (h *health) healthTimeout() time.Duration {
	if d := h.machine.Spec.MachineHealthTimeout; d != nil {
		return d.Duration
	}

	return h.settings.HealthTimeout
}
