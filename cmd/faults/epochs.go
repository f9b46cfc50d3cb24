package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/internal/stack"
)

// leaseName is that of the Lease with which mcm counts epochs.
const leaseName = "machine-controller-manager"

func lease(namespace string) *coordinationv1.Lease {
	return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: leaseName}}
}

// seldom is how rarely the faults of epochs are made, of the times that they are drawn,
// once each has hit as often as it is to: nothing moves for some ten seconds after each.
const seldom = 4

// due reports whether a fault that is made seldom is to be made.
func (w *world) due(e event) bool { return !w.tally.hasHit(e.kind) || e.way%seldom == 0 }

// epochBack deletes the Lease, or sets its count back, as the restore of a backup does.
// Then the manager that leads is killed, so that the next one begins with that.
func epochBack(ctx context.Context, w *world, t *target, e event) error {
	if !w.due(e) {
		return errMissed
	}
	err := w.soon(ctx, "the Lease goes", func(ctx context.Context) error {
		if e.way/seldom%2 == 0 {
			return client.IgnoreNotFound(w.kube.Delete(ctx, lease(w.name)))
		}
		return w.count(ctx, w.name, 0)
	})
	if err != nil {
		return err
	}
	return failOver(ctx, w, t, e)
}

// strays are the targets of strayManager: there is one where a manager can be apart
// from its bus.
func strays(w *world) []*target {
	if w.stray == nil {
		return nil
	}
	return []*target{w.strayTarget}
}

// strayManager has another manager of the same name lead for a while, with a higher
// epoch than any before.
func strayManager(ctx context.Context, w *world, _ *target, e event) error {
	if !w.due(e) {
		return errMissed
	}
	highest := uint64(0)
	for _, s := range w.tap.Sessions() {
		highest = max(highest, s.GetEpoch())
	}
	const above = 100
	err := w.soon(ctx, "the stray manager's Lease counts on", func(ctx context.Context) error {
		return w.count(ctx, w.strayNamespace(), int32(highest)+above)
	})
	if err != nil {
		return err
	}
	p, err := w.site.Restart(w.stray)
	if err != nil {
		return err
	}
	w.stray = p
	p.ExpectEnd() // without an API server it cannot start
	const patience = 12 * time.Second
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err = stack.Poll(within, "drivers follow the stray manager", func(context.Context) error {
		select {
		case <-p.Done():
			return nil
		default:
		}
		if !w.heardOf(highest + above) {
			return errMissed
		}
		return nil
	})
	if err != nil {
		return errors.Join(errMissed, err, p.Kill())
	}
	select {
	case <-p.Done():
		return errMissed
	default:
		return errors.Join(wait(ctx, e.length), p.Kill())
	}
}

// heardOf reports whether a driver has heard of an epoch, or of a higher one.
func (w *world) heardOf(epoch uint64) bool {
	for _, s := range w.tap.Sessions() {
		if s.GetEpoch() >= epoch {
			return true
		}
	}
	return false
}

// count has a Lease count from elsewhere.
func (w *world) count(ctx context.Context, namespace string, transitions int32) error {
	patch := fmt.Appendf(nil, `{"spec":{"leaseTransitions":%d}}`, transitions)
	return w.kube.Patch(ctx, lease(namespace), client.RawPatch("application/merge-patch+json", patch))
}

func (w *world) strayNamespace() string { return w.name + "-stray" }

// startStray starts the stray manager and ends it again, while it is alone: beside
// another one it would not get ready.
func (w *world) startStray(ctx context.Context, args []string) error {
	if err := w.kube.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.strayNamespace()}}); err != nil {
		return err
	}
	m, err := w.site.StartManager(ctx, stack.ManagerOptions{
		Name: "mcm-stray", Control: w.cluster.Kubeconfig, Namespace: w.strayNamespace(), Cluster: w.name, NATSURL: w.busURL, Args: args,
	})
	if err != nil {
		return err
	}
	w.stray = m.Process
	return m.Kill()
}
