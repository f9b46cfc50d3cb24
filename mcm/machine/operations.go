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

// runOperation begins an operation, or looks how it is doing. It lets the step go on
// only when the operation is done; the step then stores what came of it.
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
		Told: strings.HasPrefix(o.machine.Status.LastOperation.Description, textWaiting),
	}
	if err := o.resumeOperation(ctx, &op, known); err != nil {
		return dispatch.State{}, steps.Wait, err
	}
	o.unsent = false
	state := o.dispatcher.Start(op)
	if op.Recover && state.Phase != dispatch.Stale {
		o.log.Info("taking up an operation begun earlier", "operation_id", op.ID(), "attempt", state.Attempt, "replica", state.Replica)
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
		// conflict; or somebody turned the journal back, and this sets it right.
		o.journal = o.journal.settleAs(state.Settled)

		return state, steps.Again(steps.ConflictRetry), o.patch(ctx)
	default:
		return state, steps.Wait, nil
	}
}

// resumeOperation has an operation continue that another manager began, or this one before it was
// restarted. It stores before anything is sent that a create may be with a driver: the
// manager that began it, and no longer leads without knowing that, must not take it for one
// that no driver has heard of, and let the Machine go without a delete.
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

// awaitDriver holds up a create that no provider was asked for so far until somebody
// serves the one that the class names. What is journaled binds the machine to that: a
// manager that finds it could not tell that no driver has ever had it. Until then a
// correction of the class is all it takes.
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

// discardOperation settles an operation that was given up before any driver saw it: the
// class names another provider by now, and the next one goes there.
func (o *operations) discardOperation(ctx context.Context, state dispatch.State) error {
	o.journal = o.journal.discard()
	if err := o.patch(ctx); err != nil {
		return err
	}
	o.dispatcher.Settle(o.machine.UID, state.ID)

	return nil
}

// overtakeLater takes an operation up again behind a later one whose claim the driver's
// stream holds, as after the restore of an older backup of the Machine. What that one
// and others did is not known here: so the new one looks before it makes anything, as
// one that was begun before.
func (o *operations) overtakeLater(ctx context.Context, state dispatch.State, later int64) error {
	behind := o.journal
	o.journal = behind.overtake(state.Kind, o.class.provider, later, o.now)
	o.cautionf("JournalBehind", "%s continues as operation %d: this Machine counts %d, but its driver has seen operation %d "+
		"(the Machine is from an older backup)", state.Kind, later+1, behind.Settled, later)
	if err := o.patch(ctx); err != nil {
		return err
	}
	o.dispatcher.Settle(o.machine.UID, state.ID)

	return nil
}

// machineFor is the machine as a provider's driver may see it: what another
// one's remembers of it is nothing to it, and may mislead it.
func (o *operations) machineFor(provider string) *v1alpha1.Machine {
	m := o.machine.DeepCopy()
	if !o.journal.stateIsOf(provider) {
		m.Status.LastKnownState = ""
	}

	return m
}

// keepDriverState keeps what a driver wants to be told again, and notes whose it is.
// The caller stores status and journal.
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

// reportWaiting tells what the operation waits for, when it is anything to speak of.
func (o *operations) reportWaiting(ctx context.Context, state dispatch.State) error {
	if state.Reason == "" {
		return nil
	}
	text := textWaiting + state.Reason
	if o.machine.Status.LastOperation.Description != text {
		o.cautionf("WaitingForDriver", "%s waits: %s", state.Kind, state.Reason)
	}
	kind := operationType(state.Kind)
	if !o.machine.DeletionTimestamp.IsZero() {
		kind = v1alpha1.MachineOperationDelete // whatever is asked, that is what for
	}
	o.setLastOperation(kind, v1alpha1.MachineStateProcessing, "", text)

	return o.patchStatus(ctx)
}

// operationTimeout is how long an attempt may take. What a class says wrongly
// keeps machines from being made, not from being deleted.
func (o *operations) operationTimeout() time.Duration {
	d, err := classTimeout(o.class.Object, o.settings.OperationTimeout)
	if err != nil && o.unsent {
		o.warnf("InvalidField", "%s; it is not used, the operation may take %s", fault(err), d)
	}

	return d
}

// reportRunning takes back what waiting has told.
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
	if err := o.patch(ctx); err != nil {
		return steps.Wait, err
	}
	o.dispatcher.Settle(o.machine.UID, state.ID)
	o.warnf(reason, "%s failed with %s (driver replica %s, attempt %d), next try in %s: %s", state.Kind,
		dispatch.CodeOf(state.Err), orPlain(state.Replica), state.Attempt, retry, fault(state.Err))

	return steps.Again(retry), nil
}
