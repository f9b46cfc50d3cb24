package machine

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// nodeInTheWay returns the Node of another instance under whose name a new
// instance would join, nil when there is none. Providers that name Nodes after
// addresses may give a name again while the Node that had it is still there.
func (p *pass) nodeInTheWay(ctx context.Context, i *dispatch.Instance) (*corev1.Node, error) {
	if p.Target == nil || i.NodeName == p.machine.Name {
		return nil, nil //nolint:nilnil // a Node is the exception
	}
	node := &corev1.Node{}
	err := p.Target.Get(ctx, client.ObjectKey{Name: i.NodeName}, node)
	if apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // as above
	}
	if err != nil {
		return nil, fmt.Errorf("read node %s of a new instance: %w", i.NodeName, err)
	}
	id := node.Spec.ProviderID
	switch {
	case id != "" && v1alpha1.SameInstance(id, i.ProviderID), id == "" && node.Labels[v1alpha1.LabelKeyMachineName] == p.machine.Name:
		return nil, nil //nolint:nilnil // it has joined already, before its create was told of
	case id == "" && !node.CreationTimestamp.Before(&p.machine.CreationTimestamp):
		return nil, nil //nolint:nilnil // it may well be its own
	default:
		return node, nil
	}
}

// giveBack begins the deletion of an instance that must not join, because it
// would take over another one's Node with all that is bound to it.
func (p *pass) giveBack(ctx context.Context, state dispatch.State, node *corev1.Node) (next, error) {
	p.setPhase(v1alpha1.MachineFailed)
	p.setLastOperation(v1alpha1.MachineOperationCreate, v1alpha1.MachineStateFailed, "", v1alpha1.TextOldNode)
	if err := p.patchStatus(ctx); err != nil {
		return wait, err
	}
	p.machine.Spec.ProviderID = state.Instance.ProviderID
	p.journal = p.journal.settle()
	p.journal.Provider, p.journal.Return = state.Provider, true
	p.begin(dispatch.Delete)
	p.cautionf("OldNode", "Deletes instance %s: it would join as node %s, which is instance %q of before; "+
		"delete that Node if its instance is gone", state.Instance.ProviderID, node.Name, node.Spec.ProviderID)
	if err := p.patch(ctx); err != nil {
		return wait, err
	}
	p.Dispatcher.Settle(p.machine.UID, state.ID)

	return p.returnInstance(ctx)
}

// returnInstance goes on with what giveBack has begun. Then the machine is as if
// it had never had an instance.
func (p *pass) returnInstance(ctx context.Context) (next, error) {
	if !p.journal.Return {
		return proceed, nil
	}
	if err := p.classForDelete(ctx); err != nil {
		if dispatch.CodeOf(err) == dispatch.Unknown {
			return wait, err
		}
		p.stayOldNode(err)

		return again(p.Settings.Retry.Long), p.patchStatus(ctx)
	}
	state, n, err := p.operate(ctx, dispatch.Delete)
	if n.stop || err != nil {
		return n, err
	}
	if code := dispatch.CodeOf(state.Err); code != dispatch.OK && code != dispatch.NotFound {
		p.stayOldNode(state.Err)

		return p.deleteFailed(ctx, state)
	}
	if state.Stated {
		p.remember(state)
	}
	p.setPhase(v1alpha1.MachineFailed)
	p.setLastOperation(v1alpha1.MachineOperationCreate, v1alpha1.MachineStateFailed, "", v1alpha1.TextOldNode)
	if err := p.patchStatus(ctx); err != nil {
		return wait, err
	}
	gone := p.machine.Spec.ProviderID
	p.machine.Spec.ProviderID = ""
	p.journal = p.journal.returned(p.now, p.Settings.Retry.Medium, p.version)
	if err := p.patch(ctx); err != nil {
		return wait, err
	}
	p.Dispatcher.Settle(p.machine.UID, state.ID)
	p.tellDeleted(gone, state)

	return again(p.Settings.Retry.Medium), nil
}

// stayOldNode says why an instance that must not join is still there.
func (p *pass) stayOldNode(err error) {
	text := v1alpha1.TextOldNode + ". " + v1alpha1.ErrorText(dispatch.CodeOf(err).String(), fault(err))
	if p.machine.Status.LastOperation.Description != text {
		p.cautionf("CannotDelete", "%s", fault(err))
	}
	p.setPhase(v1alpha1.MachineFailed)
	p.setLastOperation(v1alpha1.MachineOperationCreate, v1alpha1.MachineStateFailed, "", text)
}

func (p *pass) tellDeleted(providerID string, state dispatch.State) {
	p.sayf("InstanceDeleted", "Deleted instance %s in %s (driver replica %s, attempt %d)",
		providerID, state.Took.Round(time.Millisecond), orPlain(state.Replica), state.Attempt)
}
