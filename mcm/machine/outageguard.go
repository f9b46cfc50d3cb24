package machine

import (
	"cmp"
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// An OutageGuard freezes all machines while the API server of the control or of the target
// cluster cannot be read, because the state of Nodes is unknown then: the reconciler only
// deletes. After the outage it resets the health timeout of every Unknown machine. It runs
// on the leader. Its fields are set once and then only read.
type OutageGuard struct {
	// Control and Target read from the API servers, not from caches; Target is nil if
	// there is no target cluster.
	Control client.Client
	Target  client.Reader
	// Namespace is the one whose machines are served; empty means all.
	Namespace string
	Settings  OutageSettings
	// Unwatched returns how long no manager had led when this one started to. Longer than
	// the timeout counts as a freeze. Nil means unknown, which counts as no time.
	Unwatched func() time.Duration
	// Memory outlives this process; may be nil.
	Memory OutageMemory
	Events record.EventRecorder

	state    atomic.Int32
	failing  time.Time // since when an API server cannot be read; zero while both can
	began    time.Time // when machines were frozen
	cause    string    // and why
	reported bool      // whether an Event was recorded about this freeze
	stored   bool      // in Memory
	resets   pendingResets
	enqueue  atomic.Pointer[func(context.Context, []client.ObjectKey)]
}

// An OutageMemory says whether the previous manager left machines frozen. Nothing else
// records an outage of the target cluster.
type OutageMemory interface {
	// Frozen returns what any manager has stored last.
	Frozen(ctx context.Context) (bool, error)
	// SetFrozen stores it soon. It does not block.
	SetFrozen(frozen bool)
}

// OutageSettings are an OutageGuard's periods.
type OutageSettings struct {
	// Period is the time between two looks at the API servers. Timeout is how long one may
	// be unreadable before machines are frozen. During an outage there are five looks in
	// each Timeout.
	Period, Timeout time.Duration
}

// DefaultOutageSettings returns the settings of the machine controller manager.
func DefaultOutageSettings() OutageSettings {
	return OutageSettings{Period: time.Minute, Timeout: 30 * time.Second}
}

func (s OutageSettings) outagePeriod() time.Duration { return s.Timeout / 5 }

// The states of an OutageGuard.
const (
	idle      int32 = iota // not started, as in a manager that does not lead
	undecided              // no API server was read yet: machines are left alone
	watching
	frozen
)

// stops reports whether the reconciler leaves a machine alone that is not being deleted.
func (g *OutageGuard) stops(uid types.UID) bool {
	if g == nil || g.state.Load() != watching {
		return g != nil
	}
	_, pending := g.resets.of(uid)

	return pending
}

// Start looks at the API servers until ctx ends.
func (g *OutageGuard) Start(ctx context.Context) error {
	g.state.Store(undecided)
	if why := g.frozenBefore(ctx); why != "" {
		g.freeze(ctx, why)
	}
	for {
		timer := time.NewTimer(g.checkServers(ctx))
		select {
		case <-ctx.Done():
			timer.Stop()

			return nil
		case <-timer.C:
		}
	}
}

// frozenBefore returns why machines count as frozen from the start, "" if they do not.
func (g *OutageGuard) frozenBefore(ctx context.Context) (why string) {
	if g.Unwatched != nil {
		if away := g.Unwatched(); away > g.Settings.Timeout {
			return fmt.Sprintf("no manager has looked at machines for %s", away)
		}
	}
	if g.Memory == nil {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, g.Settings.outagePeriod())
	defer cancel()
	switch left, err := g.Memory.Frozen(ctx); {
	case err != nil: // a needless reset costs time, a missing one an instance
		return "cannot read whether the previous manager had frozen them: " + err.Error()
	case left:
		return "the previous manager had frozen them before it ended"
	default:
		return ""
	}
}

// checkServers reads from the API servers once, and returns the time until the next look.
func (g *OutageGuard) checkServers(ctx context.Context) time.Duration {
	began := time.Now()
	err := g.probe(ctx)
	if err == nil {
		if err = g.endFreeze(ctx); err == nil {
			g.failing = time.Time{}

			return g.Settings.Period
		}
		g.log(ctx).Error(err, "machines stay frozen: cannot list them or reset their health timeouts")
	}
	if g.failing.IsZero() {
		g.failing = began
		g.log(ctx).Info("cannot read from an API server; machines will be frozen after the timeout",
			"timeout", g.Settings.Timeout.String(), "err", err.Error())
	}
	if !g.reported && time.Since(g.failing) > g.Settings.Timeout {
		g.reported = true
		g.freeze(ctx, err.Error())
		g.announce(ctx, corev1.EventTypeWarning, "MachinesFrozen", "Machines are frozen, only deletions go on: "+g.cause)
	}

	return g.Settings.outagePeriod()
}

// probe reads from both API servers an object that cannot exist: NotFound is an answer.
func (g *OutageGuard) probe(ctx context.Context) error {
	const name = "dummy_name"
	read := func(cluster string, r client.Reader, key client.ObjectKey, o client.Object) error {
		ctx, cancel := context.WithTimeout(ctx, g.Settings.outagePeriod())
		defer cancel()
		if err := client.IgnoreNotFound(r.Get(ctx, key, o)); err != nil {
			return fmt.Errorf("read from the API server of the %s cluster: %w", cluster, err)
		}

		return nil
	}
	namespace := cmp.Or(g.Namespace, metav1.NamespaceDefault)
	err := read("control", g.Control, client.ObjectKey{Namespace: namespace, Name: name}, &v1alpha1.Machine{})
	if err != nil || g.Target == nil {
		return err
	}

	return read("target", g.Target, client.ObjectKey{Name: name}, &corev1.Node{})
}

func (g *OutageGuard) freeze(ctx context.Context, why string) {
	if g.cause = why; g.state.Swap(frozen) != frozen {
		g.began = time.Now()
	}
	if g.Memory != nil {
		g.Memory.SetFrozen(true)
		g.stored = true
	}
	g.log(ctx).Info("machines are frozen: only deletions go on", "why", why)
}

func (g *OutageGuard) log(ctx context.Context) logr.Logger {
	return ctrl.LoggerFrom(ctx).WithName("outageguard")
}

// Collectors returns the OutageGuard's metrics.
func (g *OutageGuard) Collectors() []prometheus.Collector {
	return []prometheus.Collector{prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "mcm_machine_controller_frozen",
		Help: "1 while machines are frozen because an API server cannot be read, or was not read yet; " +
			"otherwise 0, and always 0 where another manager leads.",
	}, func() float64 {
		if state := g.state.Load(); state == frozen || state == undecided {
			return 1
		}

		return 0
	})}
}

// afterOutage is a source of the machines that the OutageGuard has stopped. Nothing else
// repeats their passes.
func (r *Reconciler) afterOutage() source.Source {
	return source.Func(func(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		enqueue := func(ctx context.Context, keys []client.ObjectKey) {
			for _, key := range keys {
				queue.Add(reconcile.Request{NamespacedName: key})
			}
			if len(keys) > 0 {
				return
			}
			list := &v1alpha1.MachineList{}
			if err := r.Control.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
				r.OutageGuard.log(ctx).Error(err, "cannot list machines after an outage: they wait for the next resync")

				return
			}
			for i := range list.Items {
				queue.Add(reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])})
			}
		}
		r.OutageGuard.enqueue.Store(&enqueue)

		return nil
	})
}

// startPasses starts passes over these machines, or over all if none is named.
func (g *OutageGuard) startPasses(ctx context.Context, keys ...client.ObjectKey) {
	if enqueue := g.enqueue.Load(); enqueue != nil {
		(*enqueue)(ctx, keys)
	}
}
