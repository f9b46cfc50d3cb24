package machine

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/trace"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/steps"
)

// A cancelled creation is cancelled once more, as the first one may have been lost:
// soon after the deletion, and later ever less often, for a call at a cloud may take
// long to end.
const (
	cancelAgain     = time.Second
	cancelAgainMost = 30 * time.Second
)

// endCreation ends an operation that started before the deletion. Only one may be under
// way, and its outcome must be known.
func (d *deletion) endCreation(ctx context.Context) (steps.Next, error) {
	kind := d.journal.Operation
	if kind == "" || kind == dispatch.Delete {
		return steps.Proceed, nil
	}
	state, known := d.operationAt(d.dispatcher)
	if !known && kind == dispatch.Initialize && len(d.machine.Status.Conditions) > 0 {
		d.journal = d.journal.settle() // a Node was followed since, which comes after it

		return steps.Proceed, nil
	}
	classErr := d.class.lookupClass(ctx)
	if !known && d.class.provider == "" {
		return d.reportCannotDelete(ctx, classErr) // no driver can be asked for its outcome
	}
	if !known {
		// Another manager started it: a replica may still have it.
		provider := cmp.Or(d.journal.Provider, d.class.provider)
		state = d.dispatcher.Start(dispatch.Operation{
			Kind: kind, Number: d.journal.Settled, Machine: d.ops.machineFor(provider), Class: d.class.Class, Provider: provider,
			Timeout: d.ops.operationTimeout(), Recover: true, Attempt: 1, OnlyIfHeld: true, Span: trace.SpanFromContext(ctx),
		})
	}
	switch state.Phase {
	case dispatch.Done:
		return d.storeEndedCreation(ctx, state)
	case dispatch.Stale:
		d.journal = d.journal.settle() // as the phase that it led to said

		return steps.Proceed, nil
	default:
		if err := d.dispatcher.Cancel(d.machine.UID, state.ID); err != nil {
			d.log.Info("creation not cancelled yet", "err", err.Error())
		}

		since := d.now.Sub(d.machine.DeletionTimestamp.Time)

		return steps.Again(min(max(cancelAgain, since/4), cancelAgainMost)), d.reportEndingCreation(ctx, state)
	}
}

// reportEndingCreation says what a deletion waits for while the machine is still being made.
func (d *deletion) reportEndingCreation(ctx context.Context, state dispatch.State) error {
	who := "what came of it is not known yet"
	if state.Phase == dispatch.Running && state.Attempt > 0 {
		who = "it is at driver replica " + orPlain(state.Replica)
	}
	if state.Reason != "" {
		who = state.Reason
	}
	text := fmt.Sprintf("%s: waiting for the earlier %s to end: %s", v1alpha1.DeletionTextGetVMStatus, state.Kind, who)
	if d.machine.Status.LastOperation.Description == text {
		return nil
	}
	d.sayAfterWritef("EndingCreation", "The earlier %s is cancelled; waiting for it to end: %s", state.Kind, who)
	d.setLastOperation(v1alpha1.MachineOperationDelete, v1alpha1.MachineStateProcessing, "", text)

	return d.patchStatus(ctx)
}

// storeEndedCreation stores the outcome of an operation that started before the deletion.
func (d *deletion) storeEndedCreation(ctx context.Context, state dispatch.State) (steps.Next, error) {
	if dispatch.LaterOf(state.Err) > 0 {
		state.Lost = true // this Machine is from an older backup, and later operations are not known here
	}
	if state.Kind == dispatch.Create && d.journal.First && state.Attempt == 0 && !state.Lost {
		// No attempt ever reached a driver: there is nothing to delete, and no driver
		// needs to be asked.
		d.untouched = true

		return steps.Proceed, nil
	}
	if state.Kind == dispatch.Create && state.Err == nil && state.Instance != nil {
		d.noteInstance(state)
	}
	if state.LastKnownState != "" {
		d.ops.keepDriverState(state) // the delete may need it
		if err := d.patchStatus(ctx); err != nil {
			return steps.Wait, err
		}
	}
	d.journal = d.journal.settle()
	if state.Kind == dispatch.Create && state.Lost {
		d.noteLostCreation(state)
	}
	if err := d.ops.storeSettled(ctx, state.ID); err != nil {
		return steps.Wait, err
	}

	return steps.Proceed, nil
}

// noteInstance notes the instance that was made before the deletion was seen.
func (d *deletion) noteInstance(state dispatch.State) {
	d.machine.Spec.ProviderID, d.journal.Provider = state.Instance.ProviderID, state.Provider
	if d.target != nil && state.Instance.NodeName != "" {
		metav1.SetMetaDataLabel(&d.machine.ObjectMeta, v1alpha1.LabelKeyNode, state.Instance.NodeName)
	}
}

// noteLostCreation has the instance looked for once more after its deletion: the call may be
// at the cloud still, and the instance not in any list yet.
func (d *deletion) noteLostCreation(state dispatch.State) {
	until := metav1.NewTime(d.now.Add(d.ops.operationTimeout() + state.SettleTime).
		Truncate(time.Second).Add(time.Second)) // stored times have no fractions
	d.journal.Lost = &until
	d.sayAfterWritef("CreationLost", "It is unknown whether the creation had an effect: the instance is deleted now, and looked for again at %s",
		until.UTC().Format(time.RFC3339))
}
