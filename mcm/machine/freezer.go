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

// A Freezer stops the reconciler while the API server of the control or of the
// target cluster cannot be read: the state of Nodes is unknown then. Only
// deletions go on. Afterwards the health timeout of every Unknown machine starts
// again. It runs where the leader does. Its fields are set once and only read.
type Freezer struct {
	// Control and Target are the API servers themselves, not caches; Target is nil
	// when there is no target cluster.
	Control client.Client
	Target  client.Reader
	// Namespace is the one whose machines are served; empty means all.
	Namespace string
	Settings  FreezeSettings
	// Unwatched returns how long no manager had looked at machines when this process
	// started to. A time over the timeout counts as a freeze. Nil means unknown, which
	// changes nothing.
	Unwatched func() time.Duration
	// Memory outlives this process; nil means that nothing does.
	Memory FreezeMemory
	Events record.EventRecorder

	state    atomic.Int32
	failing  time.Time // since when an API server cannot be read; zero while both can
	began    time.Time // when machines were frozen
	cause    string    // and why
	reported bool      // whether an Event was recorded about this freeze
	noted    bool      // in Memory
	stuck    stuck
	release  atomic.Pointer[func(context.Context, []client.ObjectKey)]
}

// A FreezeMemory says whether the previous manager left machines frozen. Nothing else
// records an outage of the target cluster.
type FreezeMemory interface {
	// Frozen returns what was last noted, by whichever manager.
	Frozen(ctx context.Context) (bool, error)
	// NoteFrozen notes it soon. It does not block.
	NoteFrozen(frozen bool)
}

// FreezeSettings are a Freezer's clocks.
type FreezeSettings struct {
	// Period is the time between two looks at the API servers, Timeout how long one
	// may be unreadable before machines are frozen. Until both can be read again,
	// there are five looks in each Timeout.
	Period, Timeout time.Duration
}

// DefaultFreezeSettings are those of the machine controller manager.
func DefaultFreezeSettings() FreezeSettings {
	return FreezeSettings{Period: time.Minute, Timeout: 30 * time.Second}
}

func (s FreezeSettings) hurry() time.Duration { return s.Timeout / 5 }

// The states of a Freezer.
const (
	idle      int32 = iota // not started, as in a manager that does not lead
	undecided              // no API server was read yet: machines wait
	watching
	frozen
)

// stops reports whether a machine that is not to be deleted is left alone.
func (f *Freezer) stops(uid types.UID) bool {
	if f == nil || f.state.Load() != watching {
		return f != nil
	}
	_, stuck := f.stuck.of(uid) // as thaw has left it

	return stuck
}

// Start looks at the API servers until ctx ends.
func (f *Freezer) Start(ctx context.Context) error {
	f.state.Store(undecided)
	if why := f.frozenBefore(ctx); why != "" {
		f.freeze(ctx, why)
	}
	for {
		timer := time.NewTimer(f.checkServers(ctx))
		select {
		case <-ctx.Done():
			timer.Stop()

			return nil
		case <-timer.C:
		}
	}
}

// frozenBefore says why machines count as frozen from the start; "" if they do not.
func (f *Freezer) frozenBefore(ctx context.Context) (why string) {
	if f.Unwatched != nil {
		if away := f.Unwatched(); away > f.Settings.Timeout {
			return fmt.Sprintf("no manager has looked at machines for %s", away)
		}
	}
	if f.Memory == nil {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, f.Settings.hurry())
	defer cancel()
	switch left, err := f.Memory.Frozen(ctx); {
	case err != nil: // a needless reset costs time, a missing one an instance
		return "it is unknown whether the previous manager had frozen them: " + err.Error()
	case left:
		return "the previous manager had frozen them, and ended"
	default:
		return ""
	}
}

// checkServers reads from the API servers once, and returns when to do so again.
func (f *Freezer) checkServers(ctx context.Context) time.Duration {
	began := time.Now()
	err := f.probe(ctx)
	if err == nil {
		if err = f.thaw(ctx); err == nil {
			f.failing = time.Time{}

			return f.Settings.Period
		}
		f.log(ctx).Error(err, "machines stay frozen")
	}
	if f.failing.IsZero() {
		f.failing = began
		f.log(ctx).Info("machines will be frozen if this goes on", "for", f.Settings.Timeout.String(), "why", err.Error())
	}
	if !f.reported && time.Since(f.failing) > f.Settings.Timeout {
		f.reported = true
		f.freeze(ctx, err.Error())
		f.announce(ctx, corev1.EventTypeWarning, "MachinesFrozen", "Machines are left alone, only deletions go on: "+f.cause)
	}

	return f.Settings.hurry()
}

// probe reads from both API servers. That there is no object of that name, which
// none can have, is as good an answer as any.
func (f *Freezer) probe(ctx context.Context) error {
	const name = "dummy_name"
	read := func(cluster string, r client.Reader, key client.ObjectKey, o client.Object) error {
		ctx, cancel := context.WithTimeout(ctx, f.Settings.hurry())
		defer cancel()
		if err := client.IgnoreNotFound(r.Get(ctx, key, o)); err != nil {
			return fmt.Errorf("read from the API server of the %s cluster: %w", cluster, err)
		}

		return nil
	}
	namespace := cmp.Or(f.Namespace, metav1.NamespaceDefault)
	err := read("control", f.Control, client.ObjectKey{Namespace: namespace, Name: name}, &v1alpha1.Machine{})
	if err != nil || f.Target == nil {
		return err
	}

	return read("target", f.Target, client.ObjectKey{Name: name}, &corev1.Node{})
}

func (f *Freezer) freeze(ctx context.Context, why string) {
	if f.cause = why; f.state.Swap(frozen) != frozen {
		f.began = time.Now()
	}
	if f.Memory != nil {
		f.Memory.NoteFrozen(true)
		f.noted = true
	}
	f.log(ctx).Info("machines are frozen: only deletions go on", "why", why)
}

func (f *Freezer) log(ctx context.Context) logr.Logger {
	return ctrl.LoggerFrom(ctx).WithName("freezer")
}

// Collectors are the Freezer's metrics.
func (f *Freezer) Collectors() []prometheus.Collector {
	return []prometheus.Collector{prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "mcm_machine_controller_frozen",
		Help: "1 while machines are left alone because an API server cannot be read, or was not read yet; 0 else, and where another manager leads.",
	}, func() float64 {
		if state := f.state.Load(); state == frozen || state == undecided {
			return 1
		}

		return 0
	})}
}

// afterThaw is a source of the machines that the Freezer releases. Nothing else repeats
// the passes that it stopped.
func (r *Reconciler) afterThaw() source.Source {
	return source.Func(func(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		release := func(ctx context.Context, keys []client.ObjectKey) {
			for _, key := range keys {
				queue.Add(reconcile.Request{NamespacedName: key})
			}
			if len(keys) > 0 {
				return
			}
			list := &v1alpha1.MachineList{}
			if err := r.Control.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
				r.Freezer.log(ctx).Error(err, "cannot list the machines to look at: they wait for the next resync")

				return
			}
			for i := range list.Items {
				queue.Add(reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])})
			}
		}
		r.Freezer.release.Store(&release)

		return nil
	})
}

// letGo starts passes over these machines, or over all if none is named.
func (f *Freezer) letGo(ctx context.Context, keys ...client.ObjectKey) {
	if release := f.release.Load(); release != nil {
		(*release)(ctx, keys)
	}
}
