package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/cache"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// A witness sees since when each Machine was to go: a set replaces a machine whose
// instance was taken from it, so that in the end nothing tells of it but the cloud's
// log. It is safe for concurrent use.
type witness struct {
	mu   sync.Mutex
	seen map[string]going // by uid
}

// A going is since when a Machine was to go, zero while it was not; missed says that
// it went while nobody could look.
type going struct {
	since  time.Time
	missed bool
}

// watchMachines has a world's Machines watched until ctx ends, through restarts of the
// API server.
func (w *world) watchMachines(ctx context.Context) error {
	cfg, err := clientcmd.BuildConfigFromFlags("", w.cluster.Kubeconfig)
	if err != nil {
		return fmt.Errorf("kubeconfig %s: %w", w.cluster.Kubeconfig, err)
	}
	machines, err := cache.New(cfg, cache.Options{Scheme: w.kube.Scheme(), DefaultNamespaces: map[string]cache.Config{w.name: {}}})
	if err != nil {
		return fmt.Errorf("watch machines: %w", err)
	}
	informer, err := machines.GetInformer(ctx, &v1alpha1.Machine{}, cache.BlockUntilSynced(false))
	if err != nil {
		return fmt.Errorf("watch machines: %w", err)
	}
	w.witness = &witness{seen: map[string]going{}}
	if _, err := informer.AddEventHandler(w.witness); err != nil {
		return fmt.Errorf("watch machines: %w", err)
	}
	w.keepers.Go(func() { _ = machines.Start(ctx) })
	if !machines.WaitForCacheSync(ctx) {
		return fmt.Errorf("watch machines: %w", context.Cause(ctx))
	}
	return nil
}

// OnAdd implements cache.ResourceEventHandler.
func (w *witness) OnAdd(o any, _ bool) { w.saw(o, false) }

// OnUpdate implements cache.ResourceEventHandler.
func (w *witness) OnUpdate(_, o any) { w.saw(o, false) }

// OnDelete implements cache.ResourceEventHandler.
func (w *witness) OnDelete(o any) {
	last, missed := o.(toolscache.DeletedFinalStateUnknown)
	if missed {
		o = last.Obj
	}
	w.saw(o, missed)
}

func (w *witness) saw(o any, missed bool) {
	m, ok := o.(*v1alpha1.Machine)
	if !ok {
		return
	}
	g := going{missed: missed}
	if t := m.DeletionTimestamp; t != nil {
		g = going{since: t.Time}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen[string(m.UID)] = g
}

// caughtUp returns an error while the witness has not heard of a Machine's end: after
// a restart of the API server it hears of it late, and would take for lost what was to
// go all along.
func (w *witness) caughtUp(machines map[types.UID]*v1alpha1.Machine) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for uid, g := range w.seen {
		if g.since.IsZero() && !g.missed && machines[types.UID(uid)] == nil {
			return fmt.Errorf("the watch has not told yet that machine %s is gone", uid)
		}
	}
	return nil
}

// allows tells whether a Machine's instance might be deleted at some time: not before
// the Machine was to go, as far as anybody has seen.
func (w *witness) allows(uid string, at time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	g, seen := w.seen[uid]
	return !seen || g.missed || !g.since.IsZero() && !at.Before(g.since)
}
