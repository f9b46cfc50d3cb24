package machine

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/steps"
)

// deletion removes a machine: it ends what is under way, then removes instance, Node
// and object.
type deletion struct {
	*object
	class      *machineClass
	ops        *operations
	inquiry    *inquiry
	node       *machineNode
	token      *joinToken
	dispatcher Dispatcher
	target     client.Client // nil without a target cluster
	timings    *timings

	untouched bool // no operation of the machine ever reached a driver
}

// markTerminating notes that the machine is on its way out.
func (d *deletion) markTerminating(ctx context.Context) (steps.Next, error) {
	if !controllerutil.ContainsFinalizer(d.machine, v1alpha1.FinalizerName) {
		return steps.Wait, nil // nothing was started for it, or all is done
	}
	if d.machine.Status.CurrentStatus.Phase == v1alpha1.MachineTerminating {
		return steps.Proceed, nil
	}
	if !d.creating() && d.journal.Operation == dispatch.Initialize {
		d.journal = d.journal.settle() // as the phase says, for the last time
	}
	d.setPhase(v1alpha1.MachineTerminating)
	d.machine.Status.CurrentStatus.PreserveExpiryTime = nil
	d.setLastOperation(v1alpha1.MachineOperationDelete, v1alpha1.MachineStateProcessing, "", v1alpha1.DeletionTextGetVMStatus)
	if err := d.patchStatus(ctx); err != nil {
		return steps.Wait, err
	}
	d.sayf("Terminating", "Deletion was asked for")

	return steps.Proceed, nil
}

// deleteInstance has the machine's instance removed, if there can be one.
func (d *deletion) deleteInstance(ctx context.Context) (steps.Next, error) {
	// A machine without a journal is no such case: another manager, which keeps
	// none, may have made its instance.
	if d.untouched {
		return steps.Proceed, nil
	}
	if err := d.class.classForDelete(ctx); err != nil {
		return d.reportCannotDelete(ctx, err)
	}
	if d.class.lacking != nil && d.journal.Operation != dispatch.Delete {
		d.warnAfterWritef("MissingSecret", "The driver is asked to delete the instance without the machine's secret: %s", fault(d.class.lacking))
	}
	state, n, err := d.ops.runOperation(ctx, dispatch.Delete)
	if n.Stop || err != nil {
		return n, err
	}
	if state.Stated {
		d.ops.keepDriverState(state)
	}
	if code := dispatch.CodeOf(state.Err); code != dispatch.OK && code != dispatch.NotFound {
		text := v1alpha1.ErrorText(code.String(), fault(state.Err)) + ". "
		if !transient(code) && !d.class.mayRetryWithLastGood(code) {
			text += v1alpha1.TextAborting + " "
		}
		d.setLastOperation(v1alpha1.MachineOperationDelete, v1alpha1.MachineStateFailed, code.String(), text+v1alpha1.DeletionTextDeleteVM)

		return d.ops.deleteFailed(ctx, state)
	}
	if wait, doubt := d.journal.doubtful(d.now); doubt {
		return d.repeatDelete(ctx, state, wait)
	}
	if d.machine.Status.LastOperation.Description != v1alpha1.TextVMDeleted {
		d.setLastOperation(v1alpha1.MachineOperationDelete, v1alpha1.MachineStateProcessing, "", v1alpha1.TextVMDeleted)
		if err := d.patchStatus(ctx); err != nil {
			return steps.Wait, err
		}
		d.sayDeleted(d.machine.Spec.ProviderID, state)
	}

	return steps.Proceed, nil
}

// repeatDelete settles a delete after which the instance of a lost creation may
// still appear. The finalizer stays until one that began later has succeeded.
func (d *deletion) repeatDelete(ctx context.Context, state dispatch.State, after time.Duration) (steps.Next, error) {
	d.setLastOperation(v1alpha1.MachineOperationDelete, v1alpha1.MachineStateProcessing, "",
		textWaiting+"a lost attempt at the creation may have an effect until "+d.journal.Lost.UTC().Format(time.RFC3339))
	if err := d.patchStatus(ctx); err != nil {
		return steps.Wait, err
	}
	d.journal = d.journal.fail(d.now, after, d.class.version)
	if err := d.ops.storeSettled(ctx, state.ID); err != nil {
		return steps.Wait, err
	}

	return steps.Again(after), nil
}

// reportCannotDelete says why the class as it stands cannot be used to remove the
// instance. A change of the class starts the next pass.
func (d *deletion) reportCannotDelete(ctx context.Context, err error) (steps.Next, error) {
	if dispatch.CodeOf(err) == dispatch.Unknown {
		return steps.Wait, err // not the class's fault: the API server's
	}
	text := v1alpha1.ErrorText(dispatch.CodeOf(err).String(), fault(err)) + ". " + v1alpha1.DeletionTextDeleteVM
	retry := d.settings.Retry.Long
	if d.machine.Status.LastOperation.Description != text {
		d.warnAfterWritef("CannotDelete", "%s", fault(err))
		retry = d.settings.Retry.Short // the news that it is remembered may be on its way
	}
	d.setLastOperation(v1alpha1.MachineOperationDelete, v1alpha1.MachineStateFailed, dispatch.CodeOf(err).String(), text)

	return steps.Again(retry), d.patchStatus(ctx)
}

// deleteNode removes the Node of the instance that is gone.
func (d *deletion) deleteNode(ctx context.Context) (steps.Next, error) {
	if d.target == nil || d.machine.Labels[v1alpha1.LabelKeyNode] == "" {
		return steps.Proceed, nil
	}
	if err := d.node.lookupNode(ctx); err != nil {
		return steps.Wait, err
	}
	if d.node.found == nil {
		return steps.Proceed, nil
	}
	node := d.node.found.DeepCopy()
	if controllerutil.RemoveFinalizer(node, v1alpha1.FinalizerNameNode) {
		err := d.target.Patch(ctx, node, client.MergeFromWithOptions(d.node.found, client.MergeFromWithOptimisticLock{}))
		if client.IgnoreNotFound(err) != nil {
			return steps.Wait, fmt.Errorf("release node %s: %w", node.Name, err)
		}
	}
	if !node.DeletionTimestamp.IsZero() {
		return steps.Proceed, nil
	}
	err := d.target.Delete(ctx, node, client.Preconditions{UID: uidOf(node)})
	if client.IgnoreNotFound(err) != nil {
		return steps.Wait, fmt.Errorf("delete node %s: %w", node.Name, err)
	}

	return steps.Proceed, nil
}

func uidOf(o client.Object) *types.UID {
	uid := o.GetUID()

	return &uid
}

// releaseMachine lets the API server remove the Machine.
func (d *deletion) releaseMachine(ctx context.Context) (steps.Next, error) {
	id := dispatch.OperationID(d.machine.UID, dispatch.Delete, d.journal.Settled)
	if d.untouched {
		id = dispatch.OperationID(d.machine.UID, dispatch.Create, d.journal.Settled)
	}
	if err := d.token.withdrawToken(ctx); err != nil {
		return steps.Wait, err
	}
	controllerutil.RemoveFinalizer(d.machine, v1alpha1.FinalizerName)
	if err := d.patch(ctx); err != nil && !apierrors.IsNotFound(err) {
		return steps.Wait, err
	}
	d.dispatcher.Settle(d.machine.UID, id)
	d.sayf("Deleted", "Machine, instance and node are gone")

	return steps.Wait, nil
}

// releaseTimed is releaseMachine, and measures how long the deletion took.
func (d *deletion) releaseTimed(ctx context.Context) (steps.Next, error) {
	k := d.class.metricsKind(ctx) // before its class may go as well
	n, err := d.releaseMachine(ctx)
	// Without a write of ours it was another pass that released it.
	if err == nil && !controllerutil.ContainsFinalizer(d.stored, v1alpha1.FinalizerName) {
		d.timings.observe(k, stageDelete, d.now.Sub(d.machine.DeletionTimestamp.Time))
	}

	return n, err
}
