package machine

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

const tracerName = "github.com/machinebus/machinebus/mcm/machine"

// A Dispatcher is the part of dispatch.Dispatcher that the steps use.
type Dispatcher interface {
	mutations
	Serves(op dispatch.Operation) (reason string, served bool)
	Withdraw(uid types.UID)
	Ask(op dispatch.Operation) dispatch.State
	Forget(uid types.UID)
}

// mutations are what changes something at a provider.
type mutations interface {
	Start(op dispatch.Operation) dispatch.State
	State(uid types.UID) (dispatch.State, bool)
	Settle(uid types.UID, id string)
	Cancel(uid types.UID, id string) error
}

// Tokens is the part of bootstrap.Tokens that the steps use.
type Tokens interface {
	Delete(ctx context.Context, m *v1alpha1.Machine) error
}

// A Reconciler runs the steps. Its fields are set once and only read.
type Reconciler struct {
	// Control holds the Machines; Target the Nodes, nil when there is no target
	// cluster.
	Control, Target client.Client
	// Live and LiveNodes read the same from the API servers themselves, before
	// what cannot be taken back.
	Live, LiveNodes client.Reader
	// Freezer says when to leave machines alone; nil means never.
	Freezer    *Freezer
	Dispatcher Dispatcher
	// Tokens are those with which nodes join; nil when there are none.
	Tokens Tokens
	// Drainer empties Nodes of Target; nil means that they are not drained.
	Drainer Drainer
	// Removed remembers classes and secrets that are gone; nil means that nothing
	// does.
	Removed  Removed
	Events   record.EventRecorder
	Settings Settings
	// Now is the clock; nil means time.Now.
	Now func() time.Time

	accepted sync.Map // generation by uid of a class, as last noted on it
	told     sync.Map // what was last said of a subject
	unfound  sync.Map // a failedStatus by its machine's uid

	replacements replacements
	timings      timings
}

// A pass is one look at one machine.
type pass struct {
	*Reconciler
	machine *v1alpha1.Machine // working copy
	stored  *v1alpha1.Machine // as the API server is known to have it
	journal journal
	now     time.Time
	log     logr.Logger

	class    dispatch.Class
	version  string // of the class and its secrets
	provider string
	userData bool         // a secret of the class has some
	node     *corev1.Node // nil when there is none

	unsent    bool // this pass has begun an operation and not sent it yet
	untouched bool // no operation of the machine ever reached a driver
	unhealthy bool // the machine was Failed before this pass made it Terminating

	initialized bool           // the driver has said so
	initTook    *time.Duration // what the driver took to initialize it, if it did so just now
	lacking     error          // why the class's secret is not known

	held bool // it would be Failed if not for others of its pool

	wish  string        // whether the machine is to be preserved
	after time.Duration // when to look again whatever the steps say; 0 for no need

	notes []func() // Events and figures about what the next write stores
}

// A next says what follows a step.
type next struct {
	stop  bool
	after time.Duration
}

var (
	proceed = next{}           // with the next step
	wait    = next{stop: true} // for an event
)

// again ends the pass and starts another one after d.
func again(d time.Duration) next { return next{stop: true, after: max(d, time.Millisecond)} }

// lookAgain asks for another pass after d at the latest, and for no end of this one.
func (p *pass) lookAgain(d time.Duration) { p.after = sooner(p.after, max(d, time.Millisecond)) }

// sooner is the shorter of two times to wait, of which 0 means for ever.
func sooner(a, b time.Duration) time.Duration {
	if a == 0 || b == 0 {
		return a + b
	}

	return min(a, b)
}

type step func(p *pass, ctx context.Context) (next, error)

var liveSteps = []step{
	(*pass).preserve,
	(*pass).returnInstance,
	(*pass).resolveClass,
	(*pass).findInstance,
	(*pass).createInstance,
	(*pass).initializeInstance,
	(*pass).markCreated,
	(*pass).followNode,
}

var deletionSteps = []step{
	(*pass).markTerminating,
	(*pass).endCreation,
	(*pass).findNode,
	(*pass).drainNode,
	(*pass).deleteInstance,
	(*pass).deleteNode,
	(*pass).timedRelease,
}

// Reconcile takes one machine as far as it can go at this moment.
func (r *Reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	m := &v1alpha1.Machine{}
	if err := r.Control.Get(ctx, req.NamespacedName, m); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if m.DeletionTimestamp.IsZero() && r.Freezer.stops(m.UID) {
		return reconcile.Result{}, nil // all are looked at when it is over
	}
	ctx, span := otel.Tracer(tracerName).Start(ctx, "reconcile machine",
		trace.WithAttributes(attribute.String("machinebus.machine", req.String())))
	defer span.End()
	p := &pass{
		Reconciler: r, machine: m.DeepCopy(), stored: m, now: time.Now(),
		log: logr.FromContextOrDiscard(ctx).WithValues("machine", req.String(), "uid", m.UID),
	}
	if r.Now != nil {
		p.now = r.Now()
	}
	defer func() {
		if !p.held {
			r.replacements.leave(m.UID)
		}
	}()
	steps := liveSteps
	if !m.DeletionTimestamp.IsZero() {
		steps = deletionSteps
	}
	var err error
	if p.journal, err = readJournal(m); err != nil {
		p.warnf("InvalidJournal", "%s", err.Error())

		return reconcile.Result{}, reconcile.TerminalError(err)
	}
	p.tellFaults()
	for _, do := range steps {
		n, err := do(p, ctx)
		if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			// Somebody wrote or removed the object since our cache saw it; its
			// event starts the next pass.
			p.log.V(1).Info("object has changed, looking again", "err", err.Error())

			return reconcile.Result{RequeueAfter: conflictRetry}, nil
		}
		if err != nil {
			return reconcile.Result{}, err
		}
		if n.stop {
			return reconcile.Result{RequeueAfter: sooner(n.after, p.after)}, nil
		}
	}

	return reconcile.Result{RequeueAfter: p.after}, nil
}

// conflictRetry is for the case that the event of a conflicting write was seen
// before our own write failed.
const conflictRetry = 200 * time.Millisecond

// patch stores what changed outside of status, provided that nobody else has
// changed the object since it was read.
func (p *pass) patch(ctx context.Context) error {
	if _, has := p.machine.Annotations[v1alpha1.AnnotationKeyOperation]; has || p.journal != (journal{}) {
		if err := p.journal.write(p.machine); err != nil {
			return err
		}
	}
	if equality.Semantic.DeepEqual(p.machine.ObjectMeta, p.stored.ObjectMeta) &&
		equality.Semantic.DeepEqual(p.machine.Spec, p.stored.Spec) {
		return nil
	}
	answer, changes, err := p.changes()
	if err == nil {
		err = p.Control.Patch(ctx, answer, changes)
	}
	if err != nil {
		return fmt.Errorf("store machine %s/%s: %w", p.machine.Namespace, p.machine.Name, err)
	}
	p.machine.ObjectMeta, p.machine.Spec = answer.ObjectMeta, answer.Spec
	answer.Status = p.stored.Status // what of it has changed is still to be stored
	p.wrote(answer)

	return nil
}

// patchStatus stores what changed in status, provided that nobody else has
// changed the object: a pass over an old copy must not undo what came since, and
// half of one record in another's would be neither.
func (p *pass) patchStatus(ctx context.Context) error {
	if equality.Semantic.DeepEqual(p.machine.Status, p.stored.Status) {
		return nil
	}
	answer, changes, err := p.changes()
	if err == nil {
		err = p.Control.Status().Patch(ctx, answer, changes)
	}
	if err != nil {
		return fmt.Errorf("store status of machine %s/%s: %w", p.machine.Namespace, p.machine.Name, err)
	}
	p.machine.Status, p.machine.ResourceVersion = answer.Status, answer.ResourceVersion
	before := p.stored // what else has changed is still to be stored
	before.ObjectMeta.DeepCopyInto(&answer.ObjectMeta)
	answer.ResourceVersion, answer.Spec = p.machine.ResourceVersion, before.Spec
	p.wrote(answer)

	return nil
}

// changes returns what has changed since the machine was stored, as a patch that
// somebody else's change makes fail, and the object that takes the answer: an answer
// that is decoded into the machine itself would leave in it what was not stored.
func (p *pass) changes() (*v1alpha1.Machine, client.Patch, error) {
	changes := client.MergeFromWithOptions(p.stored, client.MergeFromWithOptimisticLock{})
	data, err := changes.Data(p.machine)
	if err != nil {
		return nil, nil, fmt.Errorf("describe the changes: %w", err)
	}
	answer := &v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: p.machine.Namespace, Name: p.machine.Name}}

	return answer, client.RawPatch(changes.Type(), data), nil
}

// setPhase sets the phase; the time is that of the change, from which timeouts
// run.
func (p *pass) setPhase(phase v1alpha1.MachinePhase) {
	current := &p.machine.Status.CurrentStatus
	if current.Phase != phase {
		current.LastUpdateTime = metav1.NewTime(p.now)
	}
	current.Phase = phase
	current.TimeoutActive = phase == v1alpha1.MachinePending
	if phase == v1alpha1.MachineFailed {
		p.beginPreservation() // in the same write, or its set would replace it
	}
}

// setLastOperation sets status.lastOperation. An unchanged one keeps its time,
// so that saying the same again is no write.
func (p *pass) setLastOperation(
	kind v1alpha1.MachineOperationType, state v1alpha1.MachineState, code, description string,
) {
	last := v1alpha1.LastOperation{
		Type: kind, State: state, ErrorCode: code, Description: description,
		LastUpdateTime: p.machine.Status.LastOperation.LastUpdateTime,
	}
	if last != p.machine.Status.LastOperation {
		last.LastUpdateTime = metav1.NewTime(p.now)
		p.machine.Status.LastOperation = last
	}
}

// begun is what the dispatcher knows of the operation that the journal says was
// begun; false when it knows of none, or of a newer one than our cache.
func (p *pass) begun() (dispatch.State, bool) {
	state, known := p.Dispatcher.State(p.machine.UID)

	return state, known && state.ID == dispatch.OperationID(p.machine.UID, p.journal.Operation, p.journal.Settled)
}

// sayf and warnf record Events on the machine, about what is done. notef and
// cautionf record those about what the next write to the machine stores, once it
// is stored: after a conflict the next pass finds the same again.
func (p *pass) sayf(reason, format string, args ...any) {
	p.Events.Eventf(p.machine, corev1.EventTypeNormal, reason, format, args...)
}

func (p *pass) warnf(reason, format string, args ...any) {
	p.Events.Eventf(p.machine, corev1.EventTypeWarning, reason, format, args...)
}

func (p *pass) notef(reason, format string, args ...any) {
	p.notes = append(p.notes, func() { p.sayf(reason, format, args...) })
}

func (p *pass) cautionf(reason, format string, args ...any) {
	p.notes = append(p.notes, func() { p.warnf(reason, format, args...) })
}

// A subject is something about a machine that is said once.
type subject struct {
	uid types.UID
	of  string
}

// What there is to be said once.
const (
	aboutFields       = "fields"
	aboutWish         = "wish"
	aboutPreserve     = "preservation"
	aboutPreserveWait = "drain of a preserved node"
	aboutName         = "name"
)

func subjects(uid types.UID) []subject {
	return []subject{{uid, aboutFields}, {uid, aboutWish}, {uid, aboutPreserve}, {uid, aboutPreserveWait}, {uid, aboutName}}
}

// news tells whether text is something else than what was last said of a subject;
// that there is nothing to say any more is none.
func (p *pass) news(of, text string) bool {
	before, _ := p.told.Swap(subject{p.machine.UID, of}, text)

	return text != "" && before != text
}

// tellFaults says what is wrong with the machine's fields, once.
func (p *pass) tellFaults() {
	all := faults(p.machine)
	if !p.news(aboutFields, strings.Join(all, "\n")) {
		return
	}
	for _, fault := range all {
		p.warnf("InvalidField", "%s", fault)
	}
}

// wrote takes over what a write to the API server came to.
func (p *pass) wrote(stored *v1alpha1.Machine) {
	p.stored = stored.DeepCopy()
	for _, note := range p.notes {
		note()
	}
	p.notes = nil
}

// CreationTimeout is how long a machine may take to join: what it says itself,
// or else otherwise.
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

func (p *pass) creationTimeout() time.Duration {
	return CreationTimeout(p.machine, p.Settings.CreationTimeout)
}

func (p *pass) age() time.Duration { return p.now.Sub(p.machine.CreationTimestamp.Time) }

// creating tells whether the machine's instance is still to be made or made
// ready. A machine that Failed without ever having had one is tried further: only
// its set, if it has one, replaces it.
func (p *pass) creating() bool { return creating(p.machine) }

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

// fault returns an error's text without what an error chain adds for logs.
func fault(err error) string {
	var status apierrors.APIStatus
	if errors.As(err, &status) {
		return status.Status().Message
	}

	return err.Error()
}
