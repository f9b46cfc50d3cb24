package machine

import (
	"context"
	"strings"
	"time"

	"go.opentelemetry.io/otel/trace"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/steps"
)

// operations run a machine's operations at its driver, by its journal.
type operations struct {
	*object
	class      *machineClass
	dispatcher Dispatcher

	unsent bool // this pass has journaled an operation that it has not sent yet
}

// runOperation starts an operation, or looks how far it is. It returns steps.Proceed
// only when the operation is done; the step then stores its outcome.
func (o *operations) runOperation(ctx context.Context, kind dispatch.Kind) (dispatch.State, steps.Next, error) {
	if o.journal.Operation != kind {
		if n, err := o.openOperation(ctx, kind); n.Stop || err != nil {
			return dispatch.State{}, n, err
		}
	}
	_, known := o.operationAt(o.dispatcher)
	op := dispatch.Operation{
		Kind: kind, Number: o.journal.Settled, Machine: o.machineFor(o.class.provider), Class: o.class.Class, Provider: o.class.provider,
		Timeout: o.operationTimeout(), Span: trace.SpanFromContext(ctx),
		WaitReported: strings.HasPrefix(o.machine.Status.LastOperation.Description, textWaiting),
	}
	if err := o.resumeOperation(ctx, &op, known); err != nil {
		return dispatch.State{}, steps.Wait, err
	}
	o.unsent = false
	state := o.dispatcher.Start(op)
	if op.Recover && state.Phase != dispatch.Stale {
		o.log.Info("resuming an operation that began earlier", "operation_id", op.ID(), "attempt", state.Attempt, "replica", state.Replica)
	}
	switch state.Phase {
	case dispatch.Done:
		if state.Attempt == 0 && dispatch.CodeOf(state.Err) == dispatch.Canceled {
			return state, steps.Again(0), o.discardOperation(ctx, state)
		}
		if later := dispatch.LaterOf(state.Err); later > 0 {
			return state, steps.Again(0), o.overtakeLater(ctx, state, later)
		}

		return state, steps.Proceed, nil
	case dispatch.Waiting:
		return state, steps.Wait, o.reportWaiting(ctx, state)
	case dispatch.Running:
		return state, steps.Wait, o.reportRunning(ctx, state)
	case dispatch.Stale:
		// Either our cache has not seen yet what we stored, and this write is a
		// conflict; or the journal was turned back, and this sets it right.
		o.journal = o.journal.settleAs(state.Settled)

		return state, steps.Again(steps.ConflictRetry), o.patch(ctx)
	default:
		return state, steps.Wait, nil
	}
}

// resumeOperation continues an operation that another manager started, or this one before
// its restart. Before anything is sent it stores that a create may be with a driver. The
// manager that started it may not know yet that it no longer leads: it must not take the
// create for one that no driver has received, and release the Machine without a delete.
func (o *operations) resumeOperation(ctx context.Context, op *dispatch.Operation, known bool) error {
	if known || o.unsent {
		return nil
	}
	op.Recover, op.Attempt = true, 1
	if !o.journal.First {
		return nil
	}
	o.journal.First = false

	return o.patch(ctx)
}

// openOperation journals an operation, once its time has come.
func (o *operations) openOperation(ctx context.Context, kind dispatch.Kind) (steps.Next, error) {
	if d := o.journal.wait(kind, o.now, o.class.version); d > 0 {
		return steps.Again(d), nil
	}
	if n, err := o.awaitDriver(ctx, kind); n.Stop || err != nil {
		return n, err
	}
	controllerutil.AddFinalizer(o.machine, v1alpha1.FinalizerName)
	o.beginOperation(kind)

	return steps.Proceed, o.patch(ctx)
}

// awaitDriver delays the first create until a driver serves the provider that the class
// names. A journaled create binds the machine to that provider: another manager could
// not know that no driver has ever received it. Until then, a correction of the class
// is enough to choose another provider.
func (o *operations) awaitDriver(ctx context.Context, kind dispatch.Kind) (steps.Next, error) {
	if kind != dispatch.Create || o.journal.Provider != "" {
		return steps.Proceed, nil
	}
	reason, served := o.dispatcher.Serves(dispatch.Operation{
		Kind: kind, Number: o.journal.Settled, Machine: o.machine, Class: o.class.Class, Provider: o.class.provider, Timeout: o.settings.ReadTimeout,
	})
	if served {
		return steps.Proceed, nil
	}

	return steps.Wait, o.reportWaiting(ctx, dispatch.State{Kind: kind, Reason: reason})
}

// discardOperation settles an operation that was given up before any driver received it.
// The class names another provider by now, and the next operation goes there.
func (o *operations) discardOperation(ctx context.Context, state dispatch.State) error {
	o.journal = o.journal.discard()

	return o.storeSettled(ctx, state.ID)
}

// overtakeLater repeats an operation behind a later one whose claim the driver's stream
// holds, as after the restore of an older backup of the Machine. The later operations
// are not known here, so the new one looks before it makes anything.
func (o *operations) overtakeLater(ctx context.Context, state dispatch.State, later int64) error {
	behind := o.journal
	o.journal = behind.overtake(state.Kind, o.class.provider, later, o.now)
	o.warnAfterWritef("JournalBehind", "%s continues as operation %d: this Machine counts %d, but its driver has seen operation %d "+
		"(the Machine is from an older backup)", state.Kind, later+1, behind.Settled, later)

	return o.storeSettled(ctx, state.ID)
}

// machineFor returns the machine as a provider's driver may see it, without the state of
// another provider's driver.
func (o *operations) machineFor(provider string) *v1alpha1.Machine {
	m := o.machine.DeepCopy()
	if !o.journal.stateIsOf(provider) {
		m.Status.LastKnownState = ""
	}

	return m
}

// keepDriverState keeps the state that a driver wants back with the next operation, and
// whose state it is. The caller stores status and journal.
func (o *operations) keepDriverState(state dispatch.State) {
	o.machine.Status.LastKnownState, o.journal.StateOf = state.LastKnownState, ""
	if state.LastKnownState != "" {
		o.journal.StateOf = state.Provider
	}
}

// beginOperation notes in the journal, which the caller stores, that an operation is about
// to be sent.
func (o *operations) beginOperation(kind dispatch.Kind) {
	o.journal, o.unsent = o.journal.begin(kind, o.class.provider, o.isNew(), o.now), true
}

// textWaiting begins the description of a last operation that waits.
const textWaiting = "Waiting: "

// reportWaiting says what the operation waits for, if the dispatcher gives a reason.
func (o *operations) reportWaiting(ctx context.Context, state dispatch.State) error {
	if state.Reason == "" {
		return nil
	}
	text := textWaiting + state.Reason
	if o.machine.Status.LastOperation.Description != text {
		o.warnAfterWritef("OperationWaiting", "The %s waits: %s", state.Kind, state.Reason)
	}
	kind := operationType(state.Kind)
	if !o.machine.DeletionTimestamp.IsZero() {
		kind = v1alpha1.MachineOperationDelete // whatever the operation, it serves the deletion
	}
	o.setLastOperation(kind, v1alpha1.MachineStateProcessing, "", text)

	return o.patchStatus(ctx)
}

// operationTimeout returns how long an attempt may take. A wrong value in the class keeps
// machines from being made, not from being deleted.
func (o *operations) operationTimeout() time.Duration {
	d, err := classTimeout(o.class.Object, o.settings.OperationTimeout)
	if err != nil && o.unsent {
		o.warnf("InvalidField", "%s; it is not used, the operation may take %s", fault(err), d)
	}

	return d
}

// reportRunning replaces the text of reportWaiting.
func (o *operations) reportRunning(ctx context.Context, state dispatch.State) error {
	if !state.Waited {
		return nil
	}
	text := v1alpha1.TextCreating
	if state.Kind == dispatch.Delete {
		text = v1alpha1.DeletionTextDeleteVM
	}
	o.setLastOperation(operationType(state.Kind), v1alpha1.MachineStateProcessing, "", text)

	return o.patchStatus(ctx)
}

func operationType(kind dispatch.Kind) v1alpha1.MachineOperationType {
	if kind == dispatch.Delete {
		return v1alpha1.MachineOperationDelete
	}

	return v1alpha1.MachineOperationCreate
}

// operationFailed stores a failure, which the step has put into the status, and when the
// operation is tried again: as another one, so that no old outcome is replayed
// into it.
func (o *operations) operationFailed(ctx context.Context, state dispatch.State, reason string, retry time.Duration) (steps.Next, error) {
	if own := dispatch.RetryAfter(state.Err); own > 0 {
		retry = own
	}
	if err := o.patchStatus(ctx); err != nil {
		return steps.Wait, err
	}
	o.journal = o.journal.fail(o.now, retry, o.class.version)
	if err := o.storeSettled(ctx, state.ID); err != nil {
		return steps.Wait, err
	}
	o.warnf(reason, "%s failed with %s (driver replica %s, attempt %d), next try in %s: %s", state.Kind,
		dispatch.CodeOf(state.Err), orPlain(state.Replica), state.Attempt, retry, fault(state.Err))

	return steps.Again(retry), nil
}

// storeSettled stores the journal, which says that an operation is settled. Then the
// dispatcher forgets the operation.
func (o *operations) storeSettled(ctx context.Context, id string) error {
	if err := o.patch(ctx); err != nil {
		return err
	}
	o.dispatcher.Settle(o.machine.UID, id)

	return nil
}

// deleteFailed stores how a delete failed and when it is tried again: at once if
// the class was edited since its driver made instances from it and may be why.
func (o *operations) deleteFailed(ctx context.Context, state dispatch.State) (steps.Next, error) {
	code := dispatch.CodeOf(state.Err)
	if !o.class.mayRetryWithLastGood(code) {
		return o.operationFailed(ctx, state, "FailedDelete", o.settings.Retry.delete(code))
	}
	if err := o.patchStatus(ctx); err != nil {
		return steps.Wait, err
	}
	o.journal = o.journal.fail(o.now, 0, o.class.version)
	o.journal.LastGood = true
	o.warnAfterWritef("FailedDelete", "delete failed with %s (driver replica %s, attempt %d), next try at once with MachineClass %s "+
		"as its driver last accepted it: %s", code, orPlain(state.Replica), state.Attempt, o.class.Object.Name, fault(state.Err))
	if err := o.storeSettled(ctx, state.ID); err != nil {
		return steps.Wait, err
	}

	return steps.Again(0), nil
}
