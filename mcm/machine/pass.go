package machine

import (
	"context"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/steps"
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
	// OutageGuard freezes machines during outages of API servers; may be nil.
	OutageGuard *OutageGuard
	Dispatcher  Dispatcher
	// Tokens are those with which nodes join; nil when there are none.
	Tokens Tokens
	// Drainer empties Nodes of Target; nil means that they are not drained.
	Drainer Drainer
	// Removed remembers classes and secrets that are gone; nil for none.
	Removed  Removed
	Events   record.EventRecorder
	Settings Settings
	// Now is the clock; nil means time.Now.
	Now func() time.Time

	accepted sync.Map // generation by uid of a class, as last noted on it
	said     sync.Map // what was last said of a subject
	unfound  sync.Map // a failedStatus by its machine's uid

	replacements replacements
	timings      timings
}

// A pass is one look at one machine. It ties together the parts that take its steps.
type pass struct {
	*object
	class        *machineClass
	creation     *creation
	returning    *instanceReturn
	deletion     *deletion
	drain        *nodeDrain
	health       *health
	replacement  *replacement
	preservation *preservation
}

func (r *Reconciler) newPass(m *v1alpha1.Machine, log logr.Logger) *pass {
	o := &object{
		control: r.Control, events: r.Events, settings: &r.Settings, said: &r.said,
		machine: m.DeepCopy(), stored: m, now: time.Now(), log: log,
	}
	if r.Now != nil {
		o.now = r.Now()
	}
	class := &machineClass{object: o, dispatcher: r.Dispatcher, removed: r.Removed, accepted: &r.accepted}
	ops := &operations{object: o, class: class, dispatcher: r.Dispatcher}
	ask := &inquiry{object: o, class: class, ops: ops, dispatcher: r.Dispatcher, unfound: &r.unfound}
	node := &machineNode{object: o, target: r.Target, live: r.LiveNodes}
	token := &joinToken{object: o, node: node, tokens: r.Tokens}
	p := &pass{
		object: o, class: class,
		returning:   &instanceReturn{object: o, class: class, ops: ops, target: r.Target},
		replacement: &replacement{object: o, live: r.Live, replacements: &r.replacements},
		deletion: &deletion{
			object: o, class: class, ops: ops, inquiry: ask, node: node, token: token,
			dispatcher: r.Dispatcher, target: r.Target, timings: &r.timings,
		},
		drain: &nodeDrain{
			object: o, node: node, target: r.Target, drainer: r.Drainer,
			unhealthy: m.Status.CurrentStatus.Phase == v1alpha1.MachineFailed,
		},
		preservation: &preservation{object: o, node: node, target: r.Target, drainer: r.Drainer},
	}
	p.creation = &creation{
		object: o, class: class, ops: ops, inquiry: ask, returning: p.returning,
		dispatcher: r.Dispatcher, target: r.Target, timings: &r.timings,
	}
	p.health = &health{
		object: o, class: class, node: node, token: token, replacement: p.replacement,
		template: &nodeTemplate{object: o, node: node, target: r.Target}, target: r.Target, timings: &r.timings,
	}

	return p
}

// steps returns the steps of a pass over a machine that stays or one that is to go.
func (p *pass) steps() []steps.Step {
	if !p.machine.DeletionTimestamp.IsZero() {
		return []steps.Step{
			p.deletion.markTerminating, p.deletion.endCreation, p.deletion.findNode, p.drain.drainNode,
			p.deletion.deleteInstance, p.deletion.deleteNode, p.deletion.releaseTimed,
		}
	}

	return []steps.Step{
		p.preservation.preserveMachine, p.returning.returnInstance, p.class.resolveClass, p.creation.findInstance,
		p.creation.createInstance, p.creation.initializeInstance, p.creation.markCreated, p.health.followNode,
	}
}

// Reconcile takes one machine as far as it can go at this moment.
func (r *Reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	m := &v1alpha1.Machine{}
	if err := r.Control.Get(ctx, req.NamespacedName, m); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if m.DeletionTimestamp.IsZero() && r.OutageGuard.stops(m.UID) {
		return reconcile.Result{}, nil // all are looked at when it is over
	}
	ctx, span := otel.Tracer(tracerName).Start(ctx, "reconcile machine",
		trace.WithAttributes(attribute.String("machinebus.machine", req.String())))
	defer span.End()
	p := r.newPass(m, logr.FromContextOrDiscard(ctx).WithValues("machine", req.String(), "uid", m.UID))
	defer func() {
		if !p.replacement.held {
			r.replacements.leave(m.UID)
		}
	}()
	var err error
	if p.journal, err = readJournal(m); err != nil {
		p.warnf("InvalidJournal", "%s", err.Error())

		return reconcile.Result{}, reconcile.TerminalError(err)
	}
	p.warnInvalidFields()
	n, err := steps.Run(ctx, p.steps()...)

	return steps.Result(p.log, steps.Sooner(n.After, p.After()), err)
}
