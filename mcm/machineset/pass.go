package machineset

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

const (
	// resync is how often a set is looked at without a cause.
	resync = 10 * time.Minute
	// conflictRetry is for the case that the event of a conflicting write was
	// seen before our own write failed.
	conflictRetry = 200 * time.Millisecond
)

// A Reconciler runs the steps. Its fields are set once and only read.
type Reconciler struct {
	// Client reads from the manager's cache.
	Client client.Client
	// Live reads from the API server itself.
	Live   client.Reader
	Events record.EventRecorder
}

// A pass is one look at one set.
type pass struct {
	*Reconciler
	set      *v1alpha1.MachineSet // working copy
	stored   *v1alpha1.MachineSet // as the API server is known to have it
	selector labels.Selector
	now      time.Time
	log      logr.Logger

	machines []*v1alpha1.Machine // the set's own; read only
	orphans  []*v1alpha1.Machine // that it may adopt
	strays   []*v1alpha1.Machine // its own that no longer match

	failure *v1alpha1.MachineSetCondition // why machines could not be created or deleted
	errs    []error                       // of steps after which the pass went on
	retry   time.Duration                 // when to look again; 0 for no sooner than resync
}

// A next says what follows a step.
type next bool

const (
	proceed next = true  // with the next step
	wait    next = false // for an event
)

type step func(p *pass, ctx context.Context) (next, error)

var liveSteps = []step{
	(*pass).validate,
	(*pass).addFinalizer,
	(*pass).look,
	(*pass).release,
	(*pass).scale,
	(*pass).propagate,
	(*pass).report,
}

var deletionSteps = []step{
	(*pass).spareMachines,
	(*pass).readSelector,
	(*pass).look,
	(*pass).release,
	(*pass).deleteMachines,
	(*pass).removeFinalizer,
	(*pass).report,
}

// Reconcile takes one set as far as it can go at this moment.
func (r *Reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	set := &v1alpha1.MachineSet{}
	if err := r.Client.Get(ctx, req.NamespacedName, set); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	p := &pass{
		Reconciler: r, set: set.DeepCopy(), stored: set, now: time.Now(),
		log: logr.FromContextOrDiscard(ctx).WithValues("uid", set.UID),
	}
	steps := liveSteps
	if !set.DeletionTimestamp.IsZero() {
		steps = deletionSteps
	}
	for _, do := range steps {
		n, err := do(p, ctx)
		if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			// Somebody wrote or removed the object since it was read; its event
			// starts the next pass.
			p.log.V(1).Info("object has changed, looking again", "err", err.Error())
			p.lookAgain(conflictRetry)

			break
		}
		if err != nil {
			return reconcile.Result{}, errors.Join(append(p.errs, err)...)
		}
		if n == wait {
			return reconcile.Result{}, errors.Join(p.errs...)
		}
	}
	if len(p.errs) > 0 {
		return reconcile.Result{}, errors.Join(p.errs...)
	}
	if p.retry == 0 {
		p.retry = resync
	}

	return reconcile.Result{RequeueAfter: p.retry}, nil
}

// lookAgain asks for another pass after d at the latest.
func (p *pass) lookAgain(d time.Duration) {
	if d = max(d, time.Millisecond); p.retry == 0 || d < p.retry {
		p.retry = d
	}
}

// take makes set the one that the pass is about.
func (p *pass) take(set *v1alpha1.MachineSet) { p.set, p.stored = set.DeepCopy(), set }

// patch stores what changed outside of status, provided that nobody else has
// changed the object since it was read.
func (p *pass) patch(ctx context.Context) error {
	err := p.Client.Patch(ctx, p.set, client.MergeFromWithOptions(p.stored, client.MergeFromWithOptimisticLock{}))
	if err != nil {
		return fmt.Errorf("store machine set %s/%s: %w", p.set.Namespace, p.set.Name, err)
	}
	p.take(p.set)

	return nil
}
