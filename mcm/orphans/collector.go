package orphans

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// A Dispatcher is the part of dispatch.Dispatcher that a Collector uses.
type Dispatcher interface {
	List(ctx context.Context, provider string, class dispatch.Class) ([]dispatch.Listed, error)
	State(uid types.UID) (dispatch.State, bool)
	Remove(ctx context.Context, orphan *dispatch.Orphan, timeout time.Duration, still func(context.Context) error) error
}

// A Collector periodically looks for instances without a machine and deletes them. These
// rules keep it from deleting an instance in use:
//
//   - It lists instances first and then reads Machines, from the API server and never from
//     a cache. A Machine is older than its instance, so an instance whose Machine is
//     missing has none any more.
//   - An instance belongs to the machine with its uid or providerID. If it was recorded
//     without a uid, it belongs to the machine with its name that has no providerID yet.
//   - An instance is in use while an operation of its machine is in flight, whether or not
//     the Machine still exists.
//   - Its recorded owner must be the uid of this control cluster or one of
//     Settings.AdoptOwners. Another control plane may have the same name and use the same
//     cloud account.
//   - It deletes nothing while Barred returns an error.
//   - An instance must have been without a machine in every look of the grace period.
//   - It deletes nothing if the API server cannot be read or shows fewer than half of the
//     Machines of the look before. Nor does it delete instances of a class whose driver
//     lists fewer than half of the instances that Machines have. Then the grace period
//     starts again.
//   - It deletes nothing of a class without any Machine, or most of whose listed instances
//     have no machine: rather the Machines are lost, as after the restore of an old backup.
//     The class's annotation v1alpha1.AnnotationKeyCollectOrphans overrides this.
//   - Right before the delete it looks for the Machine once more.
//
// Its fields are set once and then only read.
type Collector struct {
	// Reader reads Machines from the API server, not from a cache.
	Reader client.Reader
	// Cache reads classes and Secrets.
	Cache      client.Reader
	Dispatcher Dispatcher
	// Nodes holds the target cluster's Nodes; nil without one.
	Nodes client.Client
	// Tokens deletes the tokens with which nodes join; nil if mcm issues none.
	Tokens   Tokens
	Events   record.EventRecorder
	Metrics  *Metrics
	Settings Settings
	// Owner is the uid of the control cluster.
	Owner string
	// Barred returns why nothing may be deleted now, or nil. It must not block. If Barred
	// is nil, deletions are always allowed.
	Barred func() error
	// Now is the clock; nil means time.Now.
	Now func() time.Time

	suspects *suspects                // nil before Watch
	unlisted []string                 // providers with a class that could not be listed, at the last look
	machines int                      // number at the last look at all classes
	seen     map[key]sighting         // of instances without a machine
	failed   map[key]*dispatch.Orphan // whose last delete failed
	foreign  map[key]bool             // instances without a machine that have another owner
	nodes    map[string]bool          // names of machines on the labels of our Nodes
}

// A sighting says since when an instance is without a machine, and when its last delete
// failed.
type sighting struct{ since, failed time.Time }

// A key is an instance's identity.
type key struct{ provider, providerID string }

// Tokens is the part of bootstrap.Tokens that a Collector uses.
type Tokens interface {
	Delete(ctx context.Context, m *v1alpha1.Machine) error
}

// Start looks for orphans every period until ctx ends, and out of turn if Watch has seen
// a suspect machine. It implements manager.Runnable and runs on the leader only.
func (c *Collector) Start(ctx context.Context) error {
	tick := time.NewTicker(c.Settings.Period)
	defer tick.Stop()
	var gapOver, retry <-chan time.Time
	wake := c.suspects.wake()
	c.Pass(ctx)
	for {
		if retry == nil && len(c.unlisted) > 0 {
			retry = time.After(c.Settings.Retry)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			c.Pass(ctx)
		case <-retry:
			retry = nil
			if len(c.unlisted) > 0 {
				c.Pass(ctx, slices.Clone(c.unlisted)...)
			}
		case <-wake:
			c.passOutOfTurn(ctx)
			wake, gapOver = nil, time.After(c.Settings.Gap)
		case <-gapOver:
			wake, gapOver = c.suspects.wake(), nil
		}
	}
}

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (c *Collector) NeedLeaderElection() bool { return true }

// Pass looks once: at the classes of these providers, or at all classes if none is given.
// It is not safe for concurrent use.
func (c *Collector) Pass(ctx context.Context, providers ...string) {
	log := ctrl.LoggerFrom(ctx).WithName("orphans")
	p := &pass{Collector: c, log: log, now: time.Now(), providers: providers}
	if c.Now != nil {
		p.now = c.Now()
	}
	outcome, err := p.run(ctx)
	if ctx.Err() != nil {
		return
	}
	c.Metrics.passes.WithLabelValues(string(outcome)).Inc()
	if err != nil {
		log.Error(err, "orphan collection deletes no instance after this look", "outcome", string(outcome))
	}
}

// An outcome is the result of a look, as the metrics show it.
type outcome string

const (
	done     outcome = "done"
	unread   outcome = "unread"   // the API server could not be read
	doubtful outcome = "doubtful" // too many Machines or instances were missing
	barred   outcome = "barred"   // Barred returned an error
)

// A pass is one look.
type pass struct {
	*Collector

	log logr.Logger
	now time.Time

	providers []string // none for all

	classes    []v1alpha1.MachineClass
	lists      []listing
	known      *machineIndex
	foreignNow map[key]bool // becomes Collector.foreign
}

func (p *pass) run(ctx context.Context) (outcome, error) {
	if err := p.mayDelete(); err != nil {
		p.restartGrace()

		return barred, err
	}
	classes := &v1alpha1.MachineClassList{}
	if err := p.Cache.List(ctx, classes, p.scope()...); err != nil {
		return unread, fmt.Errorf("list classes: %w", err)
	}
	p.classes = slices.DeleteFunc(classes.Items, func(class v1alpha1.MachineClass) bool { return !p.covers(&class) })
	p.lists = p.list(ctx)
	machines := &v1alpha1.MachineList{}
	if err := p.Reader.List(ctx, machines, p.scope()...); err != nil {
		return unread, fmt.Errorf("list machines: %w", err)
	}
	p.known = newMachineIndex(machines.Items)
	last, machinesNow := p.machines, len(machines.Items)
	if p.whole() {
		p.machines = machinesNow
	}
	orphans := p.orphans()
	if 2*machinesNow < last && len(orphans) > 0 {
		p.restartGrace()
		err := fmt.Errorf("the API server shows %d machines, and showed %d at the last look", machinesNow, last)
		p.reportKept(err)

		return doubtful, err
	}
	p.endLostDeletes(ctx)
	p.remove(ctx, p.due(orphans))
	if !p.whole() {
		return done, nil
	}
	if err := p.markNodes(ctx); err != nil {
		return unread, err
	}

	return done, nil
}

// mayDelete returns why nothing may be deleted now, or nil.
func (p *pass) mayDelete() error {
	if p.Barred == nil {
		return nil
	}

	return p.Barred()
}

// restartGrace starts the grace period of all instances again.
func (p *pass) restartGrace() {
	for k := range p.seen {
		p.seen[k] = sighting{since: p.now}
	}
}

func (p *pass) whole() bool { return len(p.providers) == 0 }

// covers reports whether this pass looks at a class. Only a pass over all classes reports
// one without a valid provider.
func (p *pass) covers(class *v1alpha1.MachineClass) bool {
	if p.whole() {
		return true
	}
	provider, err := dispatch.Provider(class, p.Settings.DefaultProvider)

	return err == nil && slices.Contains(p.providers, provider)
}

// scope limits lists to the namespace that this manager serves.
func (p *pass) scope() []client.ListOption {
	if p.Settings.Namespace == "" {
		return nil
	}

	return []client.ListOption{client.InNamespace(p.Settings.Namespace)}
}
