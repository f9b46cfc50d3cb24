package machinedeployment

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// Settings are the same for all deployments.
type Settings struct {
	// Namespace is the one that is served; empty means all.
	Namespace string
	// AnnotateNodes keeps the cluster-autoscaler from removing Nodes while a
	// rollout is under way.
	AnnotateNodes bool
}

// A Reconciler runs the steps. Its exported fields are set once and only read.
type Reconciler struct {
	// Control reads from a manager's cache; Live reads from the API server.
	Control client.Client
	Live    client.Reader
	// Target holds the Nodes; nil when there is no target cluster.
	Target   client.Client
	Events   record.EventRecorder
	Settings Settings
	// Now is the clock; nil means time.Now.
	Now func() time.Time

	ledger     ledger
	nodeFaults nodeFaults
}

// A pass is one look at one deployment.
type pass struct {
	*Reconciler
	deployment *v1alpha1.MachineDeployment // working copy
	stored     *v1alpha1.MachineDeployment // as the API server is known to have it
	now        time.Time
	log        logr.Logger

	sets     []*v1alpha1.MachineSet // of the deployment, oldest first
	latest   *v1alpha1.MachineSet   // the one of sets that has the current template; nil when there is none
	old      []*v1alpha1.MachineSet // the others
	sorted   bool                   // whether the sets were sorted into these
	machines map[types.UID][]*v1alpha1.Machine

	turned   bool    // whether the rollout under way has turned to another set
	created  string  // name of the set that this pass has made
	fault    string  // why the set could not be made
	nodeErrs []error // of Nodes, without which the pass goes on
	// How many of them this pass has tried, for the first time and again.
	nodeTries, nodeRetries int
	after                  time.Duration // when to look again; 0 for no sooner than resync
}

// A step returns whether the pass goes on with the next one.
type step func(p *pass, ctx context.Context) (bool, error)

var liveSteps = []step{
	(*pass).validate,
	(*pass).addFinalizer,
	(*pass).claimSets,
	(*pass).awaitCache,
	(*pass).findMachines,
	(*pass).markTriggered,
	(*pass).followPause,
	(*pass).rollBack,
	(*pass).findLatest,
	(*pass).rescale,
	(*pass).tendNodes,
	(*pass).rollOut,
	(*pass).cleanHistory,
}

var deletionSteps = []step{
	(*pass).claimSets,
	(*pass).deleteSets,
	(*pass).release,
}

// Reconcile takes one deployment as far as it can go at this moment.
func (r *Reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	if err := r.ledger.seed(ctx, r.Live, r.Settings.Namespace); err != nil {
		return reconcile.Result{}, err
	}
	d := &v1alpha1.MachineDeployment{}
	if err := r.Control.Get(ctx, req.NamespacedName, d); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if !r.ledger.current(d) {
		return reconcile.Result{RequeueAfter: conflictRetry}, nil
	}
	p := &pass{Reconciler: r, deployment: d.DeepCopy(), stored: d, now: r.clock(), log: logr.FromContextOrDiscard(ctx)}
	err := p.run(ctx)
	if conflict(err) {
		// Somebody wrote or removed an object since our cache saw it; its event
		// starts the next pass.
		p.log.V(1).Info("object has changed, looking again", "err", err.Error())

		return reconcile.Result{RequeueAfter: conflictRetry}, nil
	}
	if err != nil {
		return reconcile.Result{}, err
	}
	if p.after == 0 || p.after > resync {
		p.after = resync
	}

	return reconcile.Result{RequeueAfter: p.after}, nil
}

// resync is how often a deployment is looked at without a cause.
const resync = 10 * time.Minute

// conflictRetry is for the case that the event of a conflicting write was seen
// before our own write failed.
const conflictRetry = 200 * time.Millisecond

func conflict(err error) bool { return apierrors.IsConflict(err) || apierrors.IsNotFound(err) }

func (p *pass) run(ctx context.Context) error {
	if !p.deployment.DeletionTimestamp.IsZero() {
		return p.steps(ctx, deletionSteps)
	}
	err := p.steps(ctx, liveSteps)
	if conflict(err) {
		return err // the next pass meets the rest again
	}
	if !p.sorted && err == nil {
		return nil // there is nothing to report yet
	}
	told := p.report(ctx, err)
	if err != nil && conflict(told) {
		told = nil // the next pass tells it, and this one ends with the error itself
	}

	return errors.Join(err, told)
}

func (p *pass) steps(ctx context.Context, steps []step) error {
	for _, do := range steps {
		if proceed, err := do(p, ctx); !proceed || err != nil {
			return err
		}
	}

	return nil
}

// lookAgain has the deployment looked at in d, or earlier if that was asked for.
func (p *pass) lookAgain(d time.Duration) {
	d = max(d, time.Millisecond)
	if p.after == 0 || d < p.after {
		p.after = d
	}
}

// patch stores what changed in the deployment outside of status, provided that
// nobody else has changed it since it was read.
func (p *pass) patch(ctx context.Context) error {
	if equality.Semantic.DeepEqual(p.deployment.ObjectMeta, p.stored.ObjectMeta) &&
		equality.Semantic.DeepEqual(p.deployment.Spec, p.stored.Spec) {
		return nil
	}
	status := p.deployment.Status
	err := p.Control.Patch(ctx, p.deployment, client.MergeFromWithOptions(p.stored, client.MergeFromWithOptimisticLock{}))
	if err != nil {
		return fmt.Errorf("store deployment %s: %w", client.ObjectKeyFromObject(p.stored), err)
	}
	p.stored = p.deployment.DeepCopy()
	p.deployment.Status = status // the answer holds the stored one

	return nil
}

func (p *pass) notef(reason, format string, args ...any) {
	p.Events.Eventf(p.stored, corev1.EventTypeNormal, reason, format, args...)
}

func (p *pass) warnf(reason, format string, args ...any) {
	p.Events.Eventf(p.stored, corev1.EventTypeWarning, reason, format, args...)
}

func (r *Reconciler) clock() time.Time {
	if r.Now != nil {
		return r.Now()
	}

	return time.Now()
}
