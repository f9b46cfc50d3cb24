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

// lowest is the epoch with which a manager begins whose Lease counts from 0, at most.
const lowest = 2

// epochBack kills the manager that leads, and deletes the Lease, or sets its count back,
// as the restore of a backup does. The next one begins with that, below what drivers
// know, and has to get above it.
func epochBack(ctx context.Context, w *world, _ *target, e event) error {
	if !w.due(e) || w.highestHeard() <= lowest {
		return errMissed
	}
	err := w.hitLeader(ctx, func(u *unit) error {
		return u.down(func() error {
			return w.soon(ctx, "the Lease goes", func(ctx context.Context) error {
				if e.way/seldom%2 == 0 {
					return client.IgnoreNotFound(w.kube.Delete(ctx, lease(w.name)))
				}
				return w.count(ctx, w.name, 0)
			})
		})
	})
	if err != nil {
		return err
	}
	const notices = 30 * time.Second
	within, cancel := context.WithTimeout(ctx, notices)
	defer cancel()
	err = stack.Poll(within, "a manager gets above what drivers know", shows("mcm_dispatch_epoch_raised_total", w.managers...))
	if err != nil && ctx.Err() == nil {
		return errors.Join(errMissed, err)
	}
	return err
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
	highest := w.highestHeard()
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
		if w.highestHeard() < highest+above {
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

// highestHeard is the highest epoch that a driver has heard of.
func (w *world) highestHeard() (highest uint64) {
	for _, s := range w.tap.Sessions() {
		highest = max(highest, s.GetEpoch())
	}
	return highest
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
