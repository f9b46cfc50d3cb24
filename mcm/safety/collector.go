package safety

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

// A Collector looks for instances without a machine, again and again. It cannot
// delete one that is in use:
//
//   - Instances are listed first and Machines read afterwards, from the API server
//     and never from a cache. A Machine is older than its instance, so an instance
//     whose Machine is missing has none any more.
//   - An instance counts as a machine's by the machine's uid, its providerID, or, if
//     it was recorded without a uid and the machine has none yet, by its name; and as
//     in use while an operation of its machine is in flight, whether or not the
//     Machine is still there.
//   - It was recorded with the uid of this control cluster as its owner, or with one
//     of Settings.AdoptOwners. Another control plane may have the same name and the
//     same cloud account.
//   - A class without any Machine has none of its instances deleted, unless its
//     annotation v1alpha1.AnnotationKeyCollectOrphans says so: an empty register is what
//     a lost one looks like.
//   - Nothing is deleted while Barred gives a reason.
//   - It must have been without a machine in every look of the grace period.
//   - Nothing is deleted when the API server cannot be read, when it shows fewer
//     than half of the Machines of the look before, and nothing of a class whose
//     driver lists fewer than half of the instances that Machines are known to
//     have. Then the grace period begins anew.
//   - Nothing of a class is deleted whose list is for the most part of instances
//     without a machine, unless its annotation v1alpha1.AnnotationKeyCollectOrphans
//     says so: it is rather the Machines that are lost, as after the restore of an
//     old backup. That holds for ever and needs no memory of before.
//   - Right before the delete the Machine is looked for once more.
//
// Its fields are set once and only read.
type Collector struct {
	// Reader reads Machines, as they are stored and not from a cache.
	Reader client.Reader
	// Cache reads classes and Secrets.
	Cache      client.Reader
	Dispatcher Dispatcher
	// Nodes holds the target cluster's Nodes; nil without one.
	Nodes client.Client
	// Tokens are those with which nodes join; nil when there are none.
	Tokens   Tokens
	Events   record.EventRecorder
	Metrics  *Metrics
	Settings Settings
	// Owner is the uid of the control cluster.
	Owner string
	// Barred returns why nothing may be deleted now; nil means that there is never a
	// reason. It must not block.
	Barred func() error
	// Now is the clock; nil means time.Now.
	Now func() time.Time

	hurry    *hurry           // nil before Watch
	unlisted []string         // providers, at the last look
	machines int              // at the last look at everything
	seen     map[key]sighting // of instances without a machine
	foreign  map[key]bool     // instances without a machine that are not ours
	nodes    map[string]bool  // names of the machines that Nodes of ours name
}

// A sighting is what is remembered of an instance without a machine: since when it
// is one, and when its last delete failed.
type sighting struct{ since, failed time.Time }

// A key is an instance's identity.
type key struct{ provider, providerID string }

// Tokens is the part of bootstrap.Tokens that a Collector uses.
type Tokens interface {
	Delete(ctx context.Context, m *v1alpha1.Machine) error
}

// Start looks every period until ctx ends, and out of turn where Watch has seen a
// cause. It implements manager.Runnable and runs on the leader only.
func (c *Collector) Start(ctx context.Context) error {
	tick := time.NewTicker(c.Settings.Period)
	defer tick.Stop()
	var rested, retry <-chan time.Time
	wake := c.hurry.wake()
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
			wake, rested = nil, time.After(c.Settings.Gap)
		case <-rested:
			wake, rested = c.hurry.wake(), nil
		}
	}
}

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (c *Collector) NeedLeaderElection() bool { return true }

// Pass looks once: at the classes of the providers given, or at everything. It
// must not be called by several goroutines.
func (c *Collector) Pass(ctx context.Context, providers ...string) {
	log := ctrl.LoggerFrom(ctx).WithName("safety")
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
		log.Error(err, "no instance is deleted after this look", "outcome", string(outcome))
	}
}

// An outcome is what became of a look.
type outcome string

const (
	done     outcome = "done"
	unread   outcome = "unread"   // the API server was in trouble
	doubtful outcome = "doubtful" // too much was missing
	barred   outcome = "barred"   // there is a reason to delete nothing
)

// A pass is one look.
type pass struct {
	*Collector

	log logr.Logger
	now time.Time

	providers []string // none for all

	classes []v1alpha1.MachineClass
	lists   []listing
	known   *register
	strange map[key]bool // becomes Collector.foreign
}

func (p *pass) run(ctx context.Context) (outcome, error) {
	if err := p.bar(); err != nil {
		p.graceAnew()

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
	p.known = newRegister(machines.Items)
	last, machinesNow := p.machines, len(machines.Items)
	if p.whole() {
		p.machines = machinesNow
	}
	orphans := p.orphans()
	if 2*machinesNow < last && len(orphans) > 0 {
		p.graceAnew()
		err := fmt.Errorf("the API server shows %d machines, and showed %d at the last look", machinesNow, last)
		p.doubt(err)

		return doubtful, err
	}
	p.remove(ctx, p.due(orphans))
	if !p.whole() {
		return done, nil
	}
	if err := p.markNodes(ctx); err != nil {
		return unread, err
	}

	return done, nil
}

// bar returns why nothing may be deleted now.
func (p *pass) bar() error {
	if p.Barred == nil {
		return nil
	}

	return p.Barred()
}

// graceAnew has the grace period of all that was seen begin now.
func (p *pass) graceAnew() {
	for k := range p.seen {
		p.seen[k] = sighting{since: p.now}
	}
}

func (p *pass) whole() bool { return len(p.providers) == 0 }

// covers tells whether the look is at a class. One that has no valid provider is
// told of by a look at everything.
func (p *pass) covers(class *v1alpha1.MachineClass) bool {
	if p.whole() {
		return true
	}
	provider, err := dispatch.Provider(class, p.Settings.DefaultProvider)

	return err == nil && slices.Contains(p.providers, provider)
}

// scope limits what is read to what is served.
func (p *pass) scope() []client.ListOption {
	if p.Settings.Namespace == "" {
		return nil
	}

	return []client.ListOption{client.InNamespace(p.Settings.Namespace)}
}
