package machine

import (
	"context"
	"strings"
	"time"

	"go.opentelemetry.io/otel/trace"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// operate begins an operation, or looks how it is doing. It lets the step go on
// only when the operation is done; the step then stores what came of it.
func (p *pass) operate(ctx context.Context, kind dispatch.Kind) (dispatch.State, next, error) {
	if p.journal.Operation != kind {
		if n, err := p.open(ctx, kind); n.stop || err != nil {
			return dispatch.State{}, n, err
		}
	}
	_, known := p.begun()
	op := dispatch.Operation{
		Kind: kind, Number: p.journal.Settled, Machine: p.machineFor(p.provider), Class: p.class, Provider: p.provider,
		Timeout: p.operationTimeout(), Span: trace.SpanFromContext(ctx),
		Told: strings.HasPrefix(p.machine.Status.LastOperation.Description, textWaiting),
	}
	if err := p.takeUp(ctx, &op, known); err != nil {
		return dispatch.State{}, wait, err
	}
	p.unsent = false
	state := p.Dispatcher.Start(op)
	if op.Recover && state.Phase != dispatch.Stale {
		p.log.Info("taking up an operation begun earlier", "operation_id", op.ID(), "attempt", state.Attempt, "replica", state.Replica)
	}
	switch state.Phase {
	case dispatch.Done:
		if state.Attempt == 0 && dispatch.CodeOf(state.Err) == dispatch.Canceled {
			return state, again(0), p.discard(ctx, state)
		}
		if later := dispatch.LaterOf(state.Err); later > 0 {
			return state, again(0), p.overtake(ctx, state, later)
		}

		return state, proceed, nil
	case dispatch.Waiting:
		return state, wait, p.waiting(ctx, state)
	case dispatch.Running:
		return state, wait, p.running(ctx, state)
	case dispatch.Stale:
		// Either our cache has not seen yet what we stored, and this write is a
		// conflict; or somebody turned the journal back, and this sets it right.
		p.journal = p.journal.settleAs(state.Settled)

		return state, again(conflictRetry), p.patch(ctx)
	default:
		return state, wait, nil
	}
}

// takeUp has an operation continue that another manager began, or this one before it was
// restarted. It stores before anything is sent that a create may be with a driver: the
// manager that began it, and no longer leads without knowing that, must not take it for one
// that no driver has heard of, and let the Machine go without a delete.
func (p *pass) takeUp(ctx context.Context, op *dispatch.Operation, known bool) error {
	if known || p.unsent {
		return nil
	}
	op.Recover, op.Attempt = true, 1
	if !p.journal.First {
		return nil
	}
	p.journal.First = false

	return p.patch(ctx)
}

// open journals an operation, once its time has come.
func (p *pass) open(ctx context.Context, kind dispatch.Kind) (next, error) {
	if d := p.journal.wait(kind, p.now, p.version); d > 0 {
		return again(d), nil
	}
	if n, err := p.awaitDriver(ctx, kind); n.stop || err != nil {
		return n, err
	}
	controllerutil.AddFinalizer(p.machine, v1alpha1.FinalizerName)
	p.begin(kind)

	return proceed, p.patch(ctx)
}

// awaitDriver holds up a create that no provider was asked for so far until somebody
// serves the one that the class names. What is journaled binds the machine to that: a
// manager that finds it could not tell that no driver has ever had it. Until then a
// correction of the class is all it takes.
func (p *pass) awaitDriver(ctx context.Context, kind dispatch.Kind) (next, error) {
	if kind != dispatch.Create || p.journal.Provider != "" {
		return proceed, nil
	}
	reason, served := p.Dispatcher.Serves(dispatch.Operation{
		Kind: kind, Number: p.journal.Settled, Machine: p.machine, Class: p.class, Provider: p.provider, Timeout: p.Settings.ReadTimeout,
	})
	if served {
		return proceed, nil
	}

	return wait, p.waiting(ctx, dispatch.State{Kind: kind, Reason: reason})
}

// discard settles an operation that was given up before any driver saw it: the
// class names another provider by now, and the next one goes there.
func (p *pass) discard(ctx context.Context, state dispatch.State) error {
	p.journal = p.journal.discard()
	if err := p.patch(ctx); err != nil {
		return err
	}
	p.Dispatcher.Settle(p.machine.UID, state.ID)

	return nil
}

// overtake takes an operation up again behind a later one whose claim the driver's
// stream holds, as after the restore of an older backup of the Machine. What that one
// and others did is not known here: so the new one looks before it makes anything, as
// one that was begun before.
func (p *pass) overtake(ctx context.Context, state dispatch.State, later int64) error {
	behind := p.journal
	p.journal = behind.overtake(state.Kind, p.provider, later, p.now)
	p.cautionf("JournalBehind", "%s continues as operation %d: this Machine counts %d, but its driver has seen operation %d "+
		"(the Machine is from an older backup)", state.Kind, later+1, behind.Settled, later)
	if err := p.patch(ctx); err != nil {
		return err
	}
	p.Dispatcher.Settle(p.machine.UID, state.ID)

	return nil
}

// machineFor is the machine as a provider's driver may see it: what another
// one's remembers of it is nothing to it, and may mislead it.
func (p *pass) machineFor(provider string) *v1alpha1.Machine {
	m := p.machine.DeepCopy()
	if !p.journal.stateIsOf(provider) {
		m.Status.LastKnownState = ""
	}

	return m
}

// remember keeps what a driver wants to be told again, and notes whose it is.
// The caller stores status and journal.
func (p *pass) remember(state dispatch.State) {
	p.machine.Status.LastKnownState, p.journal.StateOf = state.LastKnownState, ""
	if state.LastKnownState != "" {
		p.journal.StateOf = state.Provider
	}
}

// begin notes in the journal, which the caller stores, that an operation is about
// to be sent.
func (p *pass) begin(kind dispatch.Kind) {
	p.journal, p.unsent = p.journal.begin(kind, p.provider, p.isNew(), p.now), true
}

// textWaiting begins the description of a last operation that waits.
const textWaiting = "Waiting: "

// waiting tells what the operation waits for, when it is anything to speak of.
func (p *pass) waiting(ctx context.Context, state dispatch.State) error {
	if state.Reason == "" {
		return nil
	}
	text := textWaiting + state.Reason
	if p.machine.Status.LastOperation.Description != text {
		p.cautionf("WaitingForDriver", "%s waits: %s", state.Kind, state.Reason)
	}
	kind := operationType(state.Kind)
	if !p.machine.DeletionTimestamp.IsZero() {
		kind = v1alpha1.MachineOperationDelete // whatever is asked, that is what for
	}
	p.setLastOperation(kind, v1alpha1.MachineStateProcessing, "", text)

	return p.patchStatus(ctx)
}

// operationTimeout is how long an attempt may take. What a class says wrongly
// keeps machines from being made, not from being deleted.
func (p *pass) operationTimeout() time.Duration {
	d, err := classTimeout(p.class.Object, p.Settings.OperationTimeout)
	if err != nil && p.unsent {
		p.warnf("InvalidField", "%s; it is not used, the operation may take %s", fault(err), d)
	}

	return d
}

// running takes back what waiting has told.
func (p *pass) running(ctx context.Context, state dispatch.State) error {
	if !state.Waited {
		return nil
	}
	text := v1alpha1.TextCreating
	if state.Kind == dispatch.Delete {
		text = v1alpha1.DeletionTextDeleteVM
	}
	p.setLastOperation(operationType(state.Kind), v1alpha1.MachineStateProcessing, "", text)

	return p.patchStatus(ctx)
}

func operationType(kind dispatch.Kind) v1alpha1.MachineOperationType {
	if kind == dispatch.Delete {
		return v1alpha1.MachineOperationDelete
	}

	return v1alpha1.MachineOperationCreate
}

// failed stores a failure, which the step has put into the status, and when the
// operation is tried again: as another one, so that no old outcome is replayed
// into it.
func (p *pass) failed(ctx context.Context, state dispatch.State, reason string, retry time.Duration) (next, error) {
	if own := dispatch.RetryAfter(state.Err); own > 0 {
		retry = own
	}
	if err := p.patchStatus(ctx); err != nil {
		return wait, err
	}
	p.journal = p.journal.fail(p.now, retry, p.version)
	if err := p.patch(ctx); err != nil {
		return wait, err
	}
	p.Dispatcher.Settle(p.machine.UID, state.ID)
	p.warnf(reason, "%s failed with %s (driver replica %s, attempt %d), next try in %s: %s", state.Kind,
		dispatch.CodeOf(state.Err), orPlain(state.Replica), state.Attempt, retry, fault(state.Err))

	return again(retry), nil
}
