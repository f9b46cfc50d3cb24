package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/machinebus/machinebus/cmd/internal/stack"
)

// stores are the managers that have NATS in them, with its store.
func stores(w *world) []*target {
	if w.kind != busEmbedded {
		return nil
	}
	return w.managerSet
}

// disks are those on which NATS stores streams, of a manager or of a server.
func disks(w *world) []*target { return append(stores(w), w.serverSet...) }

// diskFull fills the disk of a process until a manager has noticed, and for a while longer.
// NATS in a manager has to get over that by itself once there is space. A server is
// restarted then, which is the remedy that a manager names.
func diskFull(ctx context.Context, w *world, t *target, e event) error {
	noticed, over := w.lags(t), func(context.Context) error { return t.unit.kill(0) }
	if m := w.managerOf(t); m != nil {
		noticed = func(ctx context.Context) error {
			if m.Ready(ctx) == nil {
				return errMissed
			}
			return nil
		}
		over = func(ctx context.Context) error {
			const recovers = 90 * time.Second // half a minute after the last time, and with other faults in the way
			within, cancel := context.WithTimeout(ctx, recovers)
			defer cancel()
			return stack.Poll(within, t.name+" is ready again", m.Ready)
		}
	}
	hit := false
	err := t.unit.writesNothing(func() error {
		const notices = 20 * time.Second // of looks every 5 s, which wait for 5 s
		within, cancel := context.WithTimeout(ctx, notices)
		defer cancel()
		missed := stack.Poll(within, "a manager notices that the disk of "+t.name+" is full", noticed)
		if missed != nil {
			return errors.Join(errMissed, missed)
		}
		hit = true
		return wait(ctx, e.length)
	})
	if w.managerOf(t) != nil && !hit {
		return err
	}
	return errors.Join(err, over(ctx))
}

// lags returns [errMissed] until a manager shows that servers lack records of a stream, and
// the target is one of them.
func (w *world) lags(server *target) func(context.Context) error {
	return func(ctx context.Context) error {
		if err := shows("mcm_dispatch_operations_stream_replicas_behind", w.managers...)(ctx); err != nil {
			return err
		}
		for _, identity := range identities {
			lagging, err := stack.Lagging(ctx, w.busURL, w.name, identity)
			if err == nil && slices.Contains(lagging, server.name) { // with an error nobody leads the stream
				return nil
			}
		}
		return errMissed
	}
}

// writesNothing does something while the process can write to no file: what NATS makes of
// a write that fails, for whatever reason, is what it makes of a full disk.
func (u *unit) writesNothing(do func() error) error {
	p, err := u.there()
	if err != nil {
		return err
	}
	var before unix.Rlimit
	if err := unix.Prlimit(p.PID(), unix.RLIMIT_FSIZE, nil, &before); err != nil {
		return fmt.Errorf("limit of what %s may write: %w", p.Name, err)
	}
	full := unix.Rlimit{Cur: 1, Max: before.Max}
	if err := unix.Prlimit(p.PID(), unix.RLIMIT_FSIZE, &full, nil); err != nil {
		return fmt.Errorf("have %s write nothing: %w", p.Name, err)
	}
	err = do()
	if undone := unix.Prlimit(p.PID(), unix.RLIMIT_FSIZE, &before, nil); undone != nil && !errors.Is(undone, unix.ESRCH) {
		return fmt.Errorf("have %s write again: %w", p.Name, undone)
	}
	return err
}

// managerOf returns the manager that is a target; nil for other targets.
func (w *world) managerOf(t *target) *stack.Manager {
	for i, each := range w.managerSet {
		if each == t {
			return w.managers[i]
		}
	}
	return nil
}
