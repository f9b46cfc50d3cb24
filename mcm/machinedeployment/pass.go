package machinedeployment

import (
	"context"
	"errors"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/steps"
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

// A pass is one look at one deployment. It ties together the parts that take its steps.
type pass struct {
	*ownedSets
	scaling   *scaling
	latestSet *latestSet
	rollout   *rollout
	progress  *progress
	status    *statusReport
	nodes     *nodeTending
	marks     *deletionMarks
}

func (r *Reconciler) newPass(d *v1alpha1.MachineDeployment, log logr.Logger) *pass {
	sets := &ownedSets{
		object: &object{control: r.Control, events: r.Events, deployment: d.DeepCopy(), stored: d, now: r.clock(), log: log},
		live:   r.Live, ledger: &r.ledger,
	}
	p := &pass{
		ownedSets: sets, scaling: &scaling{sets}, progress: &progress{ownedSets: sets}, marks: &deletionMarks{sets},
		nodes: &nodeTending{ownedSets: sets, target: r.Target, annotate: r.Settings.AnnotateNodes, faults: &r.nodeFaults, clock: r.clock},
	}
	p.latestSet = &latestSet{sets, p.scaling, p.progress}
	p.rollout = &rollout{sets, p.scaling, p.latestSet, p.progress}
	p.status = &statusReport{sets, p.progress, p.nodes}

	return p
}

func (p *pass) liveSteps() []steps.Step {
	return []steps.Step{
		p.validate, p.addFinalizer, p.claimSets, p.awaitCache, p.findMachines, p.marks.markTriggered, p.progress.reportPause,
		p.rollBack, p.latestSet.findLatestSet, p.scaling.rescale, p.nodes.tendNodes, p.rollout.rollOut, p.deleteOldRevisions,
	}
}

func (p *pass) deletionSteps() []steps.Step {
	return []steps.Step{p.claimSets, p.deleteSets, p.removeFinalizer}
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
	if !r.ledger.isCurrent(d) {
		return reconcile.Result{RequeueAfter: steps.ConflictRetry}, nil
	}
	p := r.newPass(d, logr.FromContextOrDiscard(ctx))
	err := p.run(ctx)

	return steps.Result(p.log, steps.Sooner(resync, p.After()), err)
}

// resync is how often a deployment is looked at if no event asks for it.
const resync = 10 * time.Minute

func (p *pass) run(ctx context.Context) error {
	if !p.deployment.DeletionTimestamp.IsZero() {
		_, err := steps.Run(ctx, p.deletionSteps()...)

		return err
	}
	_, err := steps.Run(ctx, p.liveSteps()...)
	if steps.Outdated(err) {
		return err // the next pass meets the rest again
	}
	if !p.sorted && err == nil {
		return nil // there is nothing to report yet
	}
	reported := p.status.report(ctx, err)
	if err != nil && steps.Outdated(reported) {
		reported = nil // the next pass reports it, and this one ends with the error itself
	}

	return errors.Join(err, reported)
}

func (r *Reconciler) clock() time.Time {
	if r.Now != nil {
		return r.Now()
	}

	return time.Now()
}
