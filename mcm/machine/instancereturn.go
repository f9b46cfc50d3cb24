package machine

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/steps"
)

// instanceReturn deletes an instance that must not join, of a machine that stays.
type instanceReturn struct {
	*object
	class  *machineClass
	ops    *operations
	target client.Client // nil without a target cluster
}

// nodeInTheWay returns the Node of another instance under whose name a new
// instance would join, nil when there is none. Providers that name Nodes after
// addresses may give a name again while the Node that had it is still there.
func (r *instanceReturn) nodeInTheWay(ctx context.Context, i *dispatch.Instance) (*corev1.Node, error) {
	if r.target == nil || i.NodeName == r.machine.Name {
		return nil, nil //nolint:nilnil // a Node is the exception
	}
	node := &corev1.Node{}
	err := r.target.Get(ctx, client.ObjectKey{Name: i.NodeName}, node)
	if apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // as above
	}
	if err != nil {
		return nil, fmt.Errorf("read node %s of a new instance: %w", i.NodeName, err)
	}
	id := node.Spec.ProviderID
	switch {
	case id != "" && v1alpha1.SameInstance(id, i.ProviderID), id == "" && node.Labels[v1alpha1.LabelKeyMachineName] == r.machine.Name:
		return nil, nil //nolint:nilnil // it has joined before the create's result arrived
	case id == "" && !node.CreationTimestamp.Before(&r.machine.CreationTimestamp):
		return nil, nil //nolint:nilnil // it may well be its own
	default:
		return node, nil
	}
}

// beginReturn starts the deletion of an instance that must not join: it would take over
// another instance's Node with all that is bound to it.
func (r *instanceReturn) beginReturn(ctx context.Context, state dispatch.State, node *corev1.Node) (steps.Next, error) {
	r.setPhase(v1alpha1.MachineFailed)
	r.setLastOperation(v1alpha1.MachineOperationCreate, v1alpha1.MachineStateFailed, "", v1alpha1.TextOldNode)
	if err := r.patchStatus(ctx); err != nil {
		return steps.Wait, err
	}
	r.machine.Spec.ProviderID = state.Instance.ProviderID
	r.journal = r.journal.settle()
	r.journal.Provider, r.journal.Return = state.Provider, true
	r.ops.beginOperation(dispatch.Delete)
	r.warnAfterWritef("OldNode", "The new instance %s is deleted: it would join as node %s, and an older instance has that Node (provider id %q); "+
		"if that instance is gone, run: kubectl delete node %s", state.Instance.ProviderID, node.Name, node.Spec.ProviderID, node.Name)
	if err := r.ops.storeSettled(ctx, state.ID); err != nil {
		return steps.Wait, err
	}

	return r.returnInstance(ctx)
}

// returnInstance goes on with what beginReturn started. Then the machine is as if it
// had never had an instance.
func (r *instanceReturn) returnInstance(ctx context.Context) (steps.Next, error) {
	if !r.journal.Return {
		return steps.Proceed, nil
	}
	if err := r.class.classForDelete(ctx); err != nil {
		if dispatch.CodeOf(err) == dispatch.Unknown {
			return steps.Wait, err
		}
		r.reportReturnFailed(err)

		return steps.Again(r.settings.Retry.Long), r.patchStatus(ctx)
	}
	state, n, err := r.ops.runOperation(ctx, dispatch.Delete)
	if n.Stop || err != nil {
		return n, err
	}
	if code := dispatch.CodeOf(state.Err); code != dispatch.OK && code != dispatch.NotFound {
		r.reportReturnFailed(state.Err)

		return r.ops.deleteFailed(ctx, state)
	}
	if state.Stated {
		r.ops.keepDriverState(state)
	}
	r.setPhase(v1alpha1.MachineFailed)
	r.setLastOperation(v1alpha1.MachineOperationCreate, v1alpha1.MachineStateFailed, "", v1alpha1.TextOldNode)
	if err := r.patchStatus(ctx); err != nil {
		return steps.Wait, err
	}
	gone := r.machine.Spec.ProviderID
	r.machine.Spec.ProviderID = ""
	r.journal = r.journal.returned(r.now, r.settings.Retry.Medium, r.class.version)
	if err := r.ops.storeSettled(ctx, state.ID); err != nil {
		return steps.Wait, err
	}
	r.sayDeleted(gone, state)

	return steps.Again(r.settings.Retry.Medium), nil
}

// reportReturnFailed says why an instance that must not join is still there.
func (r *instanceReturn) reportReturnFailed(err error) {
	text := v1alpha1.TextOldNode + ". " + v1alpha1.ErrorText(dispatch.CodeOf(err).String(), fault(err))
	if r.machine.Status.LastOperation.Description != text {
		r.warnAfterWritef("CannotDelete", "%s", fault(err))
	}
	r.setPhase(v1alpha1.MachineFailed)
	r.setLastOperation(v1alpha1.MachineOperationCreate, v1alpha1.MachineStateFailed, "", text)
}
