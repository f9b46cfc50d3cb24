package machineset

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
)

// resync is how often a set is looked at if no event asks for it.
const resync = 10 * time.Minute

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
	steps.Schedule
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
}

// steps returns the steps of a pass over a set that stays or one that is to go.
func (p *pass) steps() []steps.Step {
	if !p.set.DeletionTimestamp.IsZero() {
		return []steps.Step{
			p.spareMachines, p.readSelector, p.findMachines, p.releaseMachines, p.deleteMachines, p.removeFinalizer, p.report,
		}
	}

	return []steps.Step{
		p.validate, p.addFinalizer, p.findMachines, p.releaseMachines, p.scale, p.propagate, p.report,
	}
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
	n, err := steps.Run(ctx, p.steps()...)
	if steps.Outdated(err) { // which is no reason to keep quiet about errors of earlier steps
		p.log.V(1).Info("object has changed, looking again", "err", err.Error())
		p.LookAgain(steps.ConflictRetry)
		n, err = steps.Proceed, nil // also where the step that failed would have waited
	}
	if err = errors.Join(append(p.errs, err)...); err != nil || n.Stop {
		return reconcile.Result{}, err
	}

	return reconcile.Result{RequeueAfter: steps.Sooner(resync, p.After())}, nil
}

// take makes set the one that the pass is about.
func (p *pass) take(set *v1alpha1.MachineSet) { p.set, p.stored = set.DeepCopy(), set }

// patch stores what changed outside of status, if no other writer has changed the
// object since it was read.
func (p *pass) patch(ctx context.Context) error {
	err := p.Client.Patch(ctx, p.set, client.MergeFromWithOptions(p.stored, client.MergeFromWithOptimisticLock{}))
	if err != nil {
		return fmt.Errorf("store machine set %s/%s: %w", p.set.Namespace, p.set.Name, err)
	}
	p.take(p.set)

	return nil
}
