package machine

import (
	"context"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/drain"
)

// A Drainer is the part of drain.Drainer that the steps use.
type Drainer interface {
	Notifier
	Start(req drain.Request) drain.State
	Forget(uid types.UID)
}

// drainNode has the pods of the machine's Node evicted before its instance goes.
// It looks at the drain anew in every pass: a machine may become one that is to
// be deleted by force.
func (p *pass) drainNode(ctx context.Context) (next, error) {
	if p.Drainer == nil || p.Target == nil || p.machine.Labels[v1alpha1.LabelKeyNode] == "" || p.deleting() {
		return proceed, nil
	}
	if err := p.lookupNode(ctx); err != nil {
		return wait, err
	}
	if p.node == nil {
		return proceed, nil
	}
	req, after := p.Settings.DrainPolicy.Request(p.machine, p.node, p.unhealthy, p.now)
	if p.endedByForce() {
		req.Force = true
	}
	state := p.Drainer.Start(req)
	failed := state.Phase == drain.Done && state.Err != nil && !state.Forced
	if failed {
		if left := state.Ended.Add(p.Settings.Retry.Short).Sub(p.now); left > 0 {
			return again(left), p.drainFailed(ctx, state)
		}
		p.Drainer.Forget(req.UID)
		state = p.Drainer.Start(req)
	}
	if state.Phase == drain.Done {
		return proceed, p.drained(ctx, state)
	}
	n := wait
	if after > 0 {
		n = again(after)
	}

	return n, p.draining(ctx, state)
}

// deleting tells whether the instance's deletion has begun: nothing is left that
// could end in order.
func (p *pass) deleting() bool {
	return p.journal.Operation == dispatch.Delete || p.journal.Failed == dispatch.Delete
}

// endedByForce tells that the existing manager has ended the Node's pods by force, and
// has yet to delete its VolumeAttachments. Its text stays until that is done.
func (p *pass) endedByForce() bool {
	return strings.Contains(p.machine.Status.LastOperation.Description, v1alpha1.DeletionTextDeleteVolumeAttachments)
}

// draining tells what the drain waits for. How an earlier one failed stands as
// long as there is no more to say.
func (p *pass) draining(ctx context.Context, state drain.State) error {
	before := p.machine.Status.LastOperation.Description
	told := strings.Contains(before, v1alpha1.DeletionTextDrain)
	text := v1alpha1.DeletionTextDrain
	switch {
	case p.endedByForce():
		return nil
	case state.Reason != "":
		text += ": " + state.Reason
	case told:
		return nil
	}
	if !told {
		p.notef("Draining", "Evicts the pods of node %s", p.node.Name)
	}
	if state.Held && before != text {
		p.cautionf("DrainHeldUp", "%s", state.Reason)
	}
	p.setLastOperation(v1alpha1.MachineOperationDelete, v1alpha1.MachineStateProcessing, "", text)

	return p.patchStatus(ctx)
}

// drainFailed tells how a drain failed that is tried again.
func (p *pass) drainFailed(ctx context.Context, state drain.State) error {
	text := state.Err.Error() + ". " + v1alpha1.DeletionTextDrain
	if p.machine.Status.LastOperation.Description != text {
		p.cautionf("FailedDrain", "Drain failed after %s, next try in %s: %v", state.Took.Round(time.Millisecond), p.Settings.Retry.Short, state.Err)
	}
	p.setLastOperation(v1alpha1.MachineOperationDelete, v1alpha1.MachineStateFailed, "", text)

	return p.patchStatus(ctx)
}

// drained tells that the deletion goes on. That a forced drain failed is only
// told.
func (p *pass) drained(ctx context.Context, state drain.State) error {
	if strings.Contains(p.machine.Status.LastOperation.Description, v1alpha1.DeletionTextDeleteVM) {
		return nil // told before, and perhaps why it does not go on
	}
	if state.Err != nil {
		p.cautionf("FailedDrain", "Forced drain failed after %s, deletion goes on: %v", state.Took.Round(time.Millisecond), state.Err)
	} else {
		p.notef("Drained", "Node %s is drained, after %s", p.node.Name, state.Took.Round(time.Millisecond))
	}
	p.setLastOperation(v1alpha1.MachineOperationDelete, v1alpha1.MachineStateProcessing, "", v1alpha1.DeletionTextDeleteVM)

	return p.patchStatus(ctx)
}
