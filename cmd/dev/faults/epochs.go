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

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// leaseName is the Lease with which mcm counts epochs.
const leaseName = "machine-controller-manager"

func lease(namespace string) *coordinationv1.Lease {
	return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: leaseName}}
}

// seldom is which share of the epoch faults drawn is made once each kind has hit often
// enough: nothing progresses for some ten seconds after each.
const seldom = 4

// due reports whether to make a fault of a seldom kind.
func (w *world) due(e event) bool { return !w.tally.hasHit(e.kind) || e.way%seldom == 0 }

// lowest is the highest epoch with which a manager begins whose Lease counts from 0.
const lowest = 2

// epochBack kills the leader, and deletes the Lease or resets its count, as the restore of
// a backup does. The next leader begins below the epoch that drivers know, and has to
// raise its own.
func epochBack(ctx context.Context, w *world, _ *target, e event) error {
	if !w.due(e) || w.highestHeard() <= lowest {
		return errMissed
	}
	err := w.hitLeader(ctx, func(u *unit) error {
		return u.down(func() error {
			return w.soon(ctx, "the Lease is deleted or reset", func(ctx context.Context) error {
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
	err = stack.Poll(within, "a manager raises its epoch above that of the drivers", shows("mcm_dispatch_epoch_raised_total", w.managers...))
	if err != nil && ctx.Err() == nil {
		return errors.Join(errMissed, err)
	}
	return err
}

// strays returns the targets of strayManager: one if the bus is not embedded.
func strays(w *world) []*target {
	if w.stray == nil {
		return nil
	}
	return []*target{w.strayTarget}
}

// strayManager lets another manager of the same cluster name lead for a while, with a
// higher epoch than any before.
func strayManager(ctx context.Context, w *world, _ *target, e event) error {
	if !w.due(e) {
		return errMissed
	}
	highest := w.highestHeard()
	const above = 100
	err := w.soon(ctx, "the count of the stray manager's Lease is raised", func(ctx context.Context) error {
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

// highestHeard returns the highest epoch that a driver has seen.
func (w *world) highestHeard() (highest uint64) {
	for _, s := range w.tap.Sessions() {
		highest = max(highest, s.GetEpoch())
	}
	return highest
}

// count sets the transitions of a Lease.
func (w *world) count(ctx context.Context, namespace string, transitions int32) error {
	patch := fmt.Appendf(nil, `{"spec":{"leaseTransitions":%d}}`, transitions)
	return w.kube.Patch(ctx, lease(namespace), client.RawPatch("application/merge-patch+json", patch))
}

func (w *world) strayNamespace() string { return w.name + "-stray" }

// startStray starts the stray manager and kills it, before the others start: beside them
// it would not become ready.
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
