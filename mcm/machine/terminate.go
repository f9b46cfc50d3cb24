package machine

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/trace"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// A cancelled creation is cancelled once more, as the first one may have been lost:
// soon after the deletion, and later ever less often, for a call at a cloud may take
// long to end.
const (
	cancelAgain     = time.Second
	cancelAgainMost = 30 * time.Second
)

// markTerminating notes that the machine is on its way out.
func (p *pass) markTerminating(ctx context.Context) (next, error) {
	if !controllerutil.ContainsFinalizer(p.machine, v1alpha1.FinalizerName) {
		return wait, nil // nothing was begun for it, or all is done
	}
	if p.machine.Status.CurrentStatus.Phase == v1alpha1.MachineTerminating {
		return proceed, nil
	}
	if !p.creating() && p.journal.Operation == dispatch.Initialize {
		p.journal = p.journal.settle() // as the phase says, for the last time
	}
	p.unhealthy = p.machine.Status.CurrentStatus.Phase == v1alpha1.MachineFailed
	p.setPhase(v1alpha1.MachineTerminating)
	p.machine.Status.CurrentStatus.PreserveExpiryTime = nil
	p.setLastOperation(v1alpha1.MachineOperationDelete, v1alpha1.MachineStateProcessing, "", v1alpha1.DeletionTextGetVMStatus)
	if err := p.patchStatus(ctx); err != nil {
		return wait, err
	}
	p.sayf("Terminating", "Deletion was asked for")

	return proceed, nil
}

// endCreation ends an operation that was begun before the deletion: only one
// may be under way, and what it made must be known.
func (p *pass) endCreation(ctx context.Context) (next, error) {
	kind := p.journal.Operation
	if kind == "" || kind == dispatch.Delete {
		return proceed, nil
	}
	state, known := p.begun()
	if !known && kind == dispatch.Initialize && len(p.machine.Status.Conditions) > 0 {
		p.journal = p.journal.settle() // a Node was followed since, which comes after it

		return proceed, nil
	}
	classErr := p.lookupClass(ctx)
	if !known && p.provider == "" {
		return p.cannotDelete(ctx, classErr) // nobody can be asked what became of it
	}
	if !known {
		// Begun by another manager: a replica may still have it.
		provider := cmp.Or(p.journal.Provider, p.provider)
		state = p.Dispatcher.Start(dispatch.Operation{
			Kind: kind, Number: p.journal.Settled, Machine: p.machineFor(provider), Class: p.class, Provider: provider,
			Timeout: p.operationTimeout(), Recover: true, Attempt: 1, OnlyIfHeld: true, Span: trace.SpanFromContext(ctx),
		})
	}
	switch state.Phase {
	case dispatch.Done:
		return p.creationEnded(ctx, state)
	case dispatch.Stale:
		p.journal = p.journal.settle() // as the phase that it led to said

		return proceed, nil
	default:
		if err := p.Dispatcher.Cancel(p.machine.UID, state.ID); err != nil {
			p.log.Info("creation not cancelled yet", "err", err.Error())
		}

		since := p.now.Sub(p.machine.DeletionTimestamp.Time)

		return again(min(max(cancelAgain, since/4), cancelAgainMost)), p.tellEnding(ctx, state)
	}
}

// tellEnding tells what a deletion waits for whose machine is still being made.
func (p *pass) tellEnding(ctx context.Context, state dispatch.State) error {
	who := "what came of it is not known yet"
	if state.Phase == dispatch.Running && state.Attempt > 0 {
		who = "it is at driver replica " + orPlain(state.Replica)
	}
	if state.Reason != "" {
		who = state.Reason
	}
	text := fmt.Sprintf("%s: waiting for the %s that was begun before to end: %s", v1alpha1.DeletionTextGetVMStatus, state.Kind, who)
	if p.machine.Status.LastOperation.Description == text {
		return nil
	}
	p.notef("EndingCreation", "The %s that was begun before is cancelled; waiting for it to end: %s", state.Kind, who)
	p.setLastOperation(v1alpha1.MachineOperationDelete, v1alpha1.MachineStateProcessing, "", text)

	return p.patchStatus(ctx)
}

// creationEnded stores what an operation that was begun before the deletion came
// to.
func (p *pass) creationEnded(ctx context.Context, state dispatch.State) (next, error) {
	if dispatch.LaterOf(state.Err) > 0 {
		state.Lost = true // this Machine is from an older backup: what was done since is not known here
	}
	if state.Kind == dispatch.Create && p.journal.First && state.Attempt == 0 && !state.Lost {
		// No attempt ever reached a driver: there is nothing to delete, and no driver
		// needs to be asked.
		p.untouched = true

		return proceed, nil
	}
	if state.Kind == dispatch.Create && state.Err == nil && state.Instance != nil {
		p.createdMeanwhile(state)
	}
	if state.LastKnownState != "" {
		p.remember(state) // the delete may need it
		if err := p.patchStatus(ctx); err != nil {
			return wait, err
		}
	}
	p.journal = p.journal.settle()
	if state.Kind == dispatch.Create && state.Lost {
		p.creationLost(state)
	}
	if err := p.patch(ctx); err != nil {
		return wait, err
	}
	p.Dispatcher.Settle(p.machine.UID, state.ID)

	return proceed, nil
}

// createdMeanwhile notes the instance that was made before the deletion was seen.
func (p *pass) createdMeanwhile(state dispatch.State) {
	p.machine.Spec.ProviderID, p.journal.Provider = state.Instance.ProviderID, state.Provider
	if p.Target != nil && state.Instance.NodeName != "" {
		metav1.SetMetaDataLabel(&p.machine.ObjectMeta, v1alpha1.LabelKeyNode, state.Instance.NodeName)
	}
}

// creationLost has the instance looked for once more after its deletion: the call may be
// at the cloud still, and the instance not in any list yet.
func (p *pass) creationLost(state dispatch.State) {
	until := metav1.NewTime(p.now.Add(p.operationTimeout() + state.SettleTime).
		Truncate(time.Second).Add(time.Second)) // stored times have no fractions
	p.journal.Lost = &until
	p.notef("CreationLost", "Nobody knows whether the creation had an effect: the instance is deleted now, and looked for again at %s",
		until.UTC().Format(time.RFC3339))
}

// deleteInstance has the machine's instance removed, if there can be one.
func (p *pass) deleteInstance(ctx context.Context) (next, error) {
	// A machine without a journal is no such case: another manager, which keeps
	// none, may have made its instance.
	if p.untouched {
		return proceed, nil
	}
	if err := p.classForDelete(ctx); err != nil {
		return p.cannotDelete(ctx, err)
	}
	if p.lacking != nil && p.journal.Operation != dispatch.Delete {
		p.cautionf("MissingSecret", "The driver is asked to delete the instance without it: %s", fault(p.lacking))
	}
	state, n, err := p.operate(ctx, dispatch.Delete)
	if n.stop || err != nil {
		return n, err
	}
	if state.Stated {
		p.remember(state)
	}
	if code := dispatch.CodeOf(state.Err); code != dispatch.OK && code != dispatch.NotFound {
		text := v1alpha1.ErrorText(code.String(), fault(state.Err)) + ". "
		if !transient(code) && !p.another(code) {
			text += v1alpha1.TextAborting + " "
		}
		p.setLastOperation(v1alpha1.MachineOperationDelete, v1alpha1.MachineStateFailed, code.String(), text+v1alpha1.DeletionTextDeleteVM)

		return p.deleteFailed(ctx, state)
	}
	if wait, doubt := p.journal.doubtful(p.now); doubt {
		return p.deleteAgain(ctx, state, wait)
	}
	if p.machine.Status.LastOperation.Description != v1alpha1.TextVMDeleted {
		p.setLastOperation(v1alpha1.MachineOperationDelete, v1alpha1.MachineStateProcessing, "", v1alpha1.TextVMDeleted)
		if err := p.patchStatus(ctx); err != nil {
			return wait, err
		}
		p.tellDeleted(p.machine.Spec.ProviderID, state)
	}

	return proceed, nil
}

// deleteAgain settles a delete after which the instance of a lost creation may
// still appear. The finalizer stays until one that began later has succeeded.
func (p *pass) deleteAgain(ctx context.Context, state dispatch.State, after time.Duration) (next, error) {
	p.setLastOperation(v1alpha1.MachineOperationDelete, v1alpha1.MachineStateProcessing, "",
		textWaiting+"a lost attempt at the creation may have an effect until "+p.journal.Lost.UTC().Format(time.RFC3339))
	if err := p.patchStatus(ctx); err != nil {
		return wait, err
	}
	p.journal = p.journal.fail(p.now, after, p.version)
	if err := p.patch(ctx); err != nil {
		return wait, err
	}
	p.Dispatcher.Settle(p.machine.UID, state.ID)

	return again(after), nil
}

// deleteFailed stores how a delete failed and when it is tried again: at once if
// the class was edited since its driver made instances from it and may be why.
func (p *pass) deleteFailed(ctx context.Context, state dispatch.State) (next, error) {
	code := dispatch.CodeOf(state.Err)
	if !p.another(code) {
		return p.failed(ctx, state, "FailedDelete", p.Settings.Retry.delete(code))
	}
	if err := p.patchStatus(ctx); err != nil {
		return wait, err
	}
	p.journal = p.journal.fail(p.now, 0, p.version)
	p.journal.LastGood = true
	p.cautionf("FailedDelete", "delete failed with %s (driver replica %s, attempt %d), next try at once with MachineClass %s "+
		"as its driver last accepted it: %s", code, orPlain(state.Replica), state.Attempt, p.class.Object.Name, fault(state.Err))
	if err := p.patch(ctx); err != nil {
		return wait, err
	}
	p.Dispatcher.Settle(p.machine.UID, state.ID)

	return again(0), nil
}

// cannotDelete notes that the instance cannot be removed as the class stands. A
// change of the class starts the next pass.
func (p *pass) cannotDelete(ctx context.Context, err error) (next, error) {
	if dispatch.CodeOf(err) == dispatch.Unknown {
		return wait, err // not the class's fault: the API server's
	}
	text := v1alpha1.ErrorText(dispatch.CodeOf(err).String(), fault(err)) + ". " + v1alpha1.DeletionTextDeleteVM
	retry := p.Settings.Retry.Long
	if p.machine.Status.LastOperation.Description != text {
		p.cautionf("CannotDelete", "%s", fault(err))
		retry = p.Settings.Retry.Short // the news that it is remembered may be on its way
	}
	p.setLastOperation(v1alpha1.MachineOperationDelete, v1alpha1.MachineStateFailed, dispatch.CodeOf(err).String(), text)

	return again(retry), p.patchStatus(ctx)
}

// deleteNode removes the Node of the instance that is gone.
func (p *pass) deleteNode(ctx context.Context) (next, error) {
	if p.Target == nil || p.machine.Labels[v1alpha1.LabelKeyNode] == "" {
		return proceed, nil
	}
	if err := p.lookupNode(ctx); err != nil {
		return wait, err
	}
	if p.node == nil {
		return proceed, nil
	}
	node := p.node.DeepCopy()
	if controllerutil.RemoveFinalizer(node, v1alpha1.FinalizerNameNode) {
		err := p.Target.Patch(ctx, node, client.MergeFromWithOptions(p.node, client.MergeFromWithOptimisticLock{}))
		if client.IgnoreNotFound(err) != nil {
			return wait, fmt.Errorf("release node %s: %w", node.Name, err)
		}
	}
	if !node.DeletionTimestamp.IsZero() {
		return proceed, nil
	}
	err := p.Target.Delete(ctx, node, client.Preconditions{UID: uidOf(node)})
	if client.IgnoreNotFound(err) != nil {
		return wait, fmt.Errorf("delete node %s: %w", node.Name, err)
	}

	return proceed, nil
}

func uidOf(o client.Object) *types.UID {
	uid := o.GetUID()

	return &uid
}

// release lets the API server remove the Machine.
func (p *pass) release(ctx context.Context) (next, error) {
	id := dispatch.OperationID(p.machine.UID, dispatch.Delete, p.journal.Settled)
	if p.untouched {
		id = dispatch.OperationID(p.machine.UID, dispatch.Create, p.journal.Settled)
	}
	if err := p.withdrawToken(ctx); err != nil {
		return wait, err
	}
	controllerutil.RemoveFinalizer(p.machine, v1alpha1.FinalizerName)
	if err := p.patch(ctx); err != nil && !apierrors.IsNotFound(err) {
		return wait, err
	}
	p.Dispatcher.Settle(p.machine.UID, id)
	p.sayf("Deleted", "Machine, instance and node are gone")

	return wait, nil
}

// withdrawToken deletes the token of a machine that goes without having joined.
// Nothing can ask for another one any more: no operation of it is under way. One that
// is being made at this moment is deleted by whoever makes it.
func (p *pass) withdrawToken(ctx context.Context) error {
	spent := isReady(p.machine.Status.Conditions)
	if p.Tokens == nil || spent && !p.journal.Token {
		return nil
	}

	return p.deleteToken(ctx)
}
