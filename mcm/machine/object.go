package machine

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/steps"
)

// An object is one machine as a pass reads, changes and stores it.
type object struct {
	steps.Schedule
	control  client.Client
	events   record.EventRecorder
	settings *Settings
	said     *sync.Map // what was last said of a subject

	machine *v1alpha1.Machine // working copy
	stored  *v1alpha1.Machine // as the API server has it, as far as known
	journal journal
	now     time.Time
	log     logr.Logger
	wish    string   // whether the machine is to be preserved
	notes   []func() // Events and figures about what the next write stores
}

// patch stores what changed outside of status, if no other writer has changed the
// object since it was read.
func (o *object) patch(ctx context.Context) error {
	if _, has := o.machine.Annotations[v1alpha1.AnnotationKeyOperation]; has || o.journal != (journal{}) {
		if err := o.journal.write(o.machine); err != nil {
			return err
		}
	}
	if equality.Semantic.DeepEqual(o.machine.ObjectMeta, o.stored.ObjectMeta) &&
		equality.Semantic.DeepEqual(o.machine.Spec, o.stored.Spec) {
		return nil
	}
	answer, changes, err := o.changes()
	if err == nil {
		err = o.control.Patch(ctx, answer, changes)
	}
	if err != nil {
		return fmt.Errorf("store machine %s/%s: %w", o.machine.Namespace, o.machine.Name, err)
	}
	o.machine.ObjectMeta, o.machine.Spec = answer.ObjectMeta, answer.Spec
	answer.Status = o.stored.Status // what of it has changed is still to be stored
	o.wrote(answer)

	return nil
}

// patchStatus stores what changed in status, if no other writer has changed the object:
// a pass over an old copy must not undo later writes, or mix two records.
func (o *object) patchStatus(ctx context.Context) error {
	if equality.Semantic.DeepEqual(o.machine.Status, o.stored.Status) {
		return nil
	}
	answer, changes, err := o.changes()
	if err == nil {
		err = o.control.Status().Patch(ctx, answer, changes)
	}
	if err != nil {
		return fmt.Errorf("store status of machine %s/%s: %w", o.machine.Namespace, o.machine.Name, err)
	}
	o.machine.Status, o.machine.ResourceVersion = answer.Status, answer.ResourceVersion
	before := o.stored // what else has changed is still to be stored
	before.ObjectMeta.DeepCopyInto(&answer.ObjectMeta)
	answer.ResourceVersion, answer.Spec = o.machine.ResourceVersion, before.Spec
	o.wrote(answer)

	return nil
}

// changes returns what has changed since the machine was stored, as a patch that fails if
// the object has another version, and the object that takes the answer. Decoding the answer
// into the machine itself would leave in it what was not stored.
func (o *object) changes() (*v1alpha1.Machine, client.Patch, error) {
	changes := client.MergeFromWithOptions(o.stored, client.MergeFromWithOptimisticLock{})
	data, err := changes.Data(o.machine)
	if err != nil {
		return nil, nil, fmt.Errorf("describe the changes: %w", err)
	}
	answer := &v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: o.machine.Namespace, Name: o.machine.Name}}

	return answer, client.RawPatch(changes.Type(), data), nil
}

// wrote takes over the object as a write has stored it, and records the notes about it.
func (o *object) wrote(stored *v1alpha1.Machine) {
	o.stored = stored.DeepCopy()
	for _, note := range o.notes {
		note()
	}
	o.notes = nil
}

// setPhase sets the phase; the time is that of the change, from which timeouts
// run.
func (o *object) setPhase(phase v1alpha1.MachinePhase) {
	current := &o.machine.Status.CurrentStatus
	if current.Phase != phase {
		current.LastUpdateTime = metav1.NewTime(o.now)
	}
	current.Phase = phase
	current.TimeoutActive = phase == v1alpha1.MachinePending
	if phase == v1alpha1.MachineFailed {
		o.beginPreservation() // in the same write, or its set would replace it
	}
}

// setLastOperation sets status.lastOperation. An unchanged one keeps its time,
// so that saying the same again is no write.
func (o *object) setLastOperation(
	kind v1alpha1.MachineOperationType, state v1alpha1.MachineState, code, description string,
) {
	last := v1alpha1.LastOperation{
		Type: kind, State: state, ErrorCode: code, Description: description,
		LastUpdateTime: o.machine.Status.LastOperation.LastUpdateTime,
	}
	if last != o.machine.Status.LastOperation {
		last.LastUpdateTime = metav1.NewTime(o.now)
		o.machine.Status.LastOperation = last
	}
}

// operationAt returns the dispatcher's state of the operation that the journal says is
// under way; false if it has none, or a newer one than our cache.
func (o *object) operationAt(d Dispatcher) (dispatch.State, bool) {
	state, known := d.State(o.machine.UID)

	return state, known && state.ID == dispatch.OperationID(o.machine.UID, o.journal.Operation, o.journal.Settled)
}

// failCreation sets phase and lastOperation for a creation that failed; the
// text's form is parsed by other tools. It reports whether that is news.
func (o *object) failCreation(err error, text func(code, message string) string) (news bool) {
	code := dispatch.CodeOf(err)
	before := o.machine.Status.LastOperation
	o.setLastOperation(v1alpha1.MachineOperationCreate, v1alpha1.MachineStateFailed, code.String(),
		text(code.String(), fault(err)))
	phase := v1alpha1.MachineCrashLoopBackOff
	if o.age() > o.creationTimeout() {
		phase = v1alpha1.MachineFailed
	}
	o.setPhase(phase)

	return before.Description != o.machine.Status.LastOperation.Description
}

// creating reports whether the machine's instance is still to be made or made ready. A
// machine that Failed without ever having had one is still tried: only its set, if it
// has one, replaces it.
func (o *object) creating() bool { return creating(o.machine) }

func creating(m *v1alpha1.Machine) bool {
	switch m.Status.CurrentStatus.Phase {
	case v1alpha1.MachinePhaseNew, v1alpha1.MachineCrashLoopBackOff:
		return true
	case v1alpha1.MachineFailed:
		return m.Spec.ProviderID == ""
	default:
		return false
	}
}

// CreationTimeout returns how long a machine may take to join: its own value, or else
// the one passed as otherwise.
func CreationTimeout(m *v1alpha1.Machine, otherwise time.Duration) time.Duration {
	if text, ok := m.Annotations[v1alpha1.AnnotationKeyEffectiveCreationTimeout]; ok {
		if d, err := time.ParseDuration(text); err == nil && d > 0 {
			return d
		}
	}
	if d := m.Spec.MachineCreationTimeout; d != nil {
		return d.Duration
	}

	return otherwise
}

func (o *object) creationTimeout() time.Duration {
	return CreationTimeout(o.machine, o.settings.CreationTimeout)
}

func (o *object) age() time.Duration { return o.now.Sub(o.machine.CreationTimestamp.Time) }

// isNew reports whether no manager without a journal has done anything for the machine.
// Such a manager first adds its finalizer, and writes nothing else before its create has
// ended. This one adds the finalizer together with the journal.
func (o *object) isNew() bool {
	m := o.machine
	if _, journaled := m.Annotations[v1alpha1.AnnotationKeyOperation]; journaled || m.Spec.ProviderID != "" {
		return m.Spec.ProviderID == ""
	}

	return m.Labels[v1alpha1.LabelKeyNode] == "" && m.Status.CurrentStatus.Phase == v1alpha1.MachinePhaseNew &&
		!controllerutil.ContainsFinalizer(o.stored, v1alpha1.FinalizerName)
}

// leaving reports whether the machine's instance is to go.
func (o *object) leaving() bool { return !o.machine.DeletionTimestamp.IsZero() || o.journal.Return }

// deletionBegan reports whether the instance's deletion has started: there is nothing
// left to end in order.
func (o *object) deletionBegan() bool {
	return o.journal.Operation == dispatch.Delete || o.journal.Failed == dispatch.Delete
}

// fault returns an error's text without what an error chain adds for logs.
func fault(err error) string {
	var status apierrors.APIStatus
	if errors.As(err, &status) {
		return status.Status().Message
	}

	return err.Error()
}
