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
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// A Freezer stops the reconciler while the API server of the control or of the
// target cluster cannot be read: nobody can tell then how Nodes are. Only
// deletions go on. Afterwards the health timeout of every Unknown machine begins
// anew. It runs where the leader does. Its fields are set once and only read.
type Freezer struct {
	// Control and Target are the API servers themselves, not caches; Target is nil
	// when there is no target cluster.
	Control client.Client
	Target  client.Reader
	// Namespace is the one whose machines are served; empty means all.
	Namespace string
	Settings  FreezeSettings
	// Unwatched returns for how long nobody had looked at machines when this process
	// began to. Longer than the timeout is as if they had been frozen. Nil means that
	// it is not known, which changes nothing.
	Unwatched func() time.Duration
	Events    record.EventRecorder

	state   atomic.Int32
	failing time.Time // since when an API server cannot be read; zero while both can
	thawed  atomic.Pointer[func(context.Context)]
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

// States of a Freezer.
const (
	undecided int32 = iota // no API server was read yet: machines wait
	watching
	frozen
)

// stops tells whether machines that are not to be deleted are left alone.
func (f *Freezer) stops() bool { return f != nil && f.state.Load() != watching }

// Start looks at the API servers until ctx ends.
func (f *Freezer) Start(ctx context.Context) error {
	if f.Unwatched != nil {
		if away := f.Unwatched(); away > f.Settings.Timeout {
			f.freeze(ctx, fmt.Errorf("nobody has looked at machines for %s", away))
		}
	}
	for {
		timer := time.NewTimer(f.look(ctx))
		select {
		case <-ctx.Done():
			timer.Stop()

			return nil
		case <-timer.C:
		}
	}
}

// look looks at the API servers once, and returns when to do so again.
func (f *Freezer) look(ctx context.Context) time.Duration {
	began := time.Now()
	err := f.probe(ctx)
	if err == nil && f.stops() {
		if err = f.thaw(ctx); err != nil {
			f.log(ctx).Error(err, "machines stay frozen")
		}
	}
	if err == nil {
		f.failing = time.Time{}

		return f.Settings.Period
	}
	if f.failing.IsZero() {
		f.failing = began
		f.log(ctx).Info("machines will be frozen if this goes on", "for", f.Settings.Timeout.String(), "why", err.Error())
	}
	if f.state.Load() != frozen && time.Since(f.failing) > f.Settings.Timeout {
		f.freeze(ctx, err)
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

func (f *Freezer) freeze(ctx context.Context, why error) {
	f.state.Store(frozen)
	f.log(ctx).Info("machines are frozen: only deletions go on", "why", why.Error())
}

// thaw lets the reconciler go on. A pass over an old copy of a machine whose
// timeout has begun anew cannot store anything.
func (f *Freezer) thaw(ctx context.Context) error {
	if f.state.Load() == frozen {
		if err := f.resetTimeouts(ctx); err != nil {
			return err
		}
		f.log(ctx).Info("machines are not frozen any more")
	}
	f.state.Store(watching)
	if tell := f.thawed.Load(); tell != nil {
		(*tell)(ctx)
	}

	return nil
}

// resetTimeouts makes all Unknown machines Running. The next pass makes them Unknown
// again if their Nodes are still unhealthy.
func (f *Freezer) resetTimeouts(ctx context.Context) error {
	list := &v1alpha1.MachineList{}
	if err := f.Control.List(ctx, list, client.InNamespace(f.Namespace)); err != nil {
		return fmt.Errorf("list machines: %w", err)
	}
	var changed error
	for i := range list.Items {
		m := &list.Items[i]
		if m.Status.CurrentStatus.Phase != v1alpha1.MachineUnknown || !m.DeletionTimestamp.IsZero() {
			continue
		}
		err := f.resetTimeout(ctx, m)
		switch {
		case apierrors.IsConflict(err):
			changed = err // by its deletion, say: it is looked at again
		case apierrors.IsInvalid(err), apierrors.IsForbidden(err):
			// No pass could store anything of it either; the others need not wait.
			f.log(ctx).Error(err, "one machine's health timeout runs on")
		case client.IgnoreNotFound(err) != nil:
			return err
		}
	}

	return changed
}

func (f *Freezer) resetTimeout(ctx context.Context, m *v1alpha1.Machine) error {
	before, now := m.DeepCopy(), metav1.Now()
	m.Status.CurrentStatus.Phase, m.Status.CurrentStatus.LastUpdateTime = v1alpha1.MachineRunning, now
	m.Status.LastOperation = v1alpha1.LastOperation{
		Type: v1alpha1.MachineOperationHealthCheck, State: v1alpha1.MachineStateSuccessful,
		Description: v1alpha1.TextHealthTimeoutReset, LastUpdateTime: now,
	}
	err := f.Control.Status().Patch(ctx, m, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if err != nil {
		return fmt.Errorf("reset the health timeout of machine %s/%s: %w", m.Namespace, m.Name, err)
	}
	f.Events.Event(m, corev1.EventTypeNormal, "HealthTimeoutReset", v1alpha1.TextHealthTimeoutReset)

	return nil
}

func (f *Freezer) log(ctx context.Context) logr.Logger {
	return ctrl.LoggerFrom(ctx).WithName("freezer")
}

// Collectors are the Freezer's metrics.
func (f *Freezer) Collectors() []prometheus.Collector {
	return []prometheus.Collector{prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "mcm_machine_controller_frozen",
		Help: "1 while machines are left alone because an API server cannot be read, else 0.",
	}, func() float64 {
		if f.state.Load() == frozen {
			return 1
		}

		return 0
	})}
}

// afterThaw is a source of all machines, whenever the Freezer lets the reconciler
// go on: passes that it stopped are not made up for by anything else.
func (r *Reconciler) afterThaw() source.Source {
	return source.Func(func(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		all := func(ctx context.Context) {
			list := &v1alpha1.MachineList{}
			if err := r.Control.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
				r.Freezer.log(ctx).Error(err, "cannot list the machines to look at: they wait for the next resync")

				return
			}
			for i := range list.Items {
				queue.Add(reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])})
			}
		}
		r.Freezer.thawed.Store(&all)

		return nil
	})
}
