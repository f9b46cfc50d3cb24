package machine

import (
	"context"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/drain"
	"github.com/machinebus/machinebus/mcm/steps"
)

// A Drainer is the part of drain.Drainer that the steps use.
type Drainer interface {
	Notifier
	Start(req drain.Request) drain.State
	Forget(uid types.UID)
}

// nodeDrain empties the Node of a machine before its instance goes.
type nodeDrain struct {
	*object
	node    *machineNode
	target  client.Client // nil without a target cluster
	drainer Drainer       // nil if Nodes are not drained

	unhealthy bool // the machine was Failed before this pass made it Terminating
}

// drainNode has the pods of the machine's Node evicted before its instance goes.
// It looks at the drain again in every pass: meanwhile the machine may have to be
// deleted by force.
func (d *nodeDrain) drainNode(ctx context.Context) (steps.Next, error) {
	if d.drainer == nil || d.target == nil || d.machine.Labels[v1alpha1.LabelKeyNode] == "" || d.deletionBegan() {
		return steps.Proceed, nil
	}
	if err := d.node.lookupNode(ctx); err != nil {
		return steps.Wait, err
	}
	if d.node.found == nil {
		return steps.Proceed, nil
	}
	req, after := d.settings.DrainPolicy.Request(d.machine, d.node.found, d.unhealthy, d.now)
	if d.endedByForce() {
		req.Force = true
	}
	state := d.drainer.Start(req)
	failed := state.Phase == drain.Done && state.Err != nil && !state.Forced
	if failed {
		if left := state.Ended.Add(d.settings.Retry.Short).Sub(d.now); left > 0 {
			return steps.Again(left), d.reportDrainFailed(ctx, state)
		}
		d.drainer.Forget(req.UID)
		state = d.drainer.Start(req)
	}
	if state.Phase == drain.Done {
		return steps.Proceed, d.reportDrained(ctx, state)
	}
	n := steps.Wait
	if after > 0 {
		n = steps.Again(after)
	}

	return n, d.reportDraining(ctx, state)
}

// endedByForce reports whether the existing manager has ended the Node's pods by force,
// and has yet to delete its VolumeAttachments. Its text stays until that is done.
func (d *nodeDrain) endedByForce() bool {
	return strings.Contains(d.machine.Status.LastOperation.Description, v1alpha1.DeletionTextDeleteVolumeAttachments)
}

// reportDraining says what the drain waits for. An earlier failure stays visible until
// there is news.
func (d *nodeDrain) reportDraining(ctx context.Context, state drain.State) error {
	before := d.machine.Status.LastOperation.Description
	started := strings.Contains(before, v1alpha1.DeletionTextDrain)
	text := v1alpha1.DeletionTextDrain
	switch {
	case d.endedByForce():
		return nil
	case state.Reason != "":
		text += ": " + state.Reason
	case started:
		return nil
	}
	if !started {
		d.sayAfterWritef("Draining", "Evicts the pods of node %s", d.node.found.Name)
	}
	if state.Blocked && before != text {
		d.warnAfterWritef("DrainHeldUp", "%s", state.Reason)
	}
	d.setLastOperation(v1alpha1.MachineOperationDelete, v1alpha1.MachineStateProcessing, "", text)

	return d.patchStatus(ctx)
}

// reportDrainFailed says why a drain failed that is tried again.
func (d *nodeDrain) reportDrainFailed(ctx context.Context, state drain.State) error {
	text := state.Err.Error() + ". " + v1alpha1.DeletionTextDrain
	if d.machine.Status.LastOperation.Description != text {
		d.warnAfterWritef("FailedDrain", "Drain failed after %s, next try in %s: %v", state.Took.Round(time.Millisecond), d.settings.Retry.Short, state.Err)
	}
	d.setLastOperation(v1alpha1.MachineOperationDelete, v1alpha1.MachineStateFailed, "", text)

	return d.patchStatus(ctx)
}

// reportDrained says that the deletion goes on, also when a forced drain failed.
func (d *nodeDrain) reportDrained(ctx context.Context, state drain.State) error {
	if strings.Contains(d.machine.Status.LastOperation.Description, v1alpha1.DeletionTextDeleteVM) {
		return nil // said before, and perhaps why it does not go on
	}
	if state.Err != nil {
		d.warnAfterWritef("FailedDrain", "Forced drain failed after %s, deletion goes on: %v", state.Took.Round(time.Millisecond), state.Err)
	} else {
		d.sayAfterWritef("Drained", "Node %s is drained, after %s", d.node.found.Name, state.Took.Round(time.Millisecond))
	}
	d.setLastOperation(v1alpha1.MachineOperationDelete, v1alpha1.MachineStateProcessing, "", v1alpha1.DeletionTextDeleteVM)

	return d.patchStatus(ctx)
}
