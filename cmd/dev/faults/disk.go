package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// stores returns the managers with an embedded NATS and its store.
func stores(w *world) []*target {
	if w.kind != busEmbedded {
		return nil
	}
	return w.managerSet
}

// disks returns the processes that store streams: managers or NATS servers.
func disks(w *world) []*target { return append(stores(w), w.serverSet...) }

// diskFull fills the disk of a process until a manager has noticed, and for a while longer.
// An embedded NATS has to recover by itself once there is space. An external server is
// restarted then, which is the remedy that mcm logs.
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
			const recovers = 90 * time.Second // mcm retries every half minute, and other faults interfere
			within, cancel := context.WithTimeout(ctx, recovers)
			defer cancel()
			return stack.Poll(within, t.name+" is ready again", m.Ready)
		}
	}
	hit := false
	err := t.unit.writesNothing(func() error {
		const notices = 20 * time.Second // mcm checks every 5 s, and waits for 5 s
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

// lags returns a check that fails with [errMissed] until a manager exports that servers
// lack records of a stream, and the target is one of them.
func (w *world) lags(server *target) func(context.Context) error {
	return func(ctx context.Context) error {
		if err := shows("mcm_dispatch_operations_stream_replicas_behind", w.managers...)(ctx); err != nil {
			return err
		}
		for _, identity := range identities {
			lagging, err := stack.Lagging(ctx, w.busURL, w.name, identity)
			if err == nil && slices.Contains(lagging, server.name) { // an error means that the stream has no leader
				return nil
			}
		}
		return errMissed
	}
}

// writesNothing calls do while the process cannot write to any file. NATS handles any
// failed write as a full disk. The limit is no byte at all: a full disk takes whole pages,
// so it does not leave a file with a byte of a short record either. nats-server 2.15
// allocates memory without bound for such a file (bus/STREAMS.md).
func (u *unit) writesNothing(do func() error) error {
	p, err := u.there()
	if err != nil {
		return err
	}
	var before unix.Rlimit
	if err := unix.Prlimit(p.PID(), unix.RLIMIT_FSIZE, nil, &before); err != nil {
		return fmt.Errorf("read the file size limit of %s: %w", p.Name, err)
	}
	full := unix.Rlimit{Cur: 0, Max: before.Max}
	if err := unix.Prlimit(p.PID(), unix.RLIMIT_FSIZE, &full, nil); err != nil {
		return fmt.Errorf("set the file size limit of %s: %w", p.Name, err)
	}
	err = do()
	if undone := unix.Prlimit(p.PID(), unix.RLIMIT_FSIZE, &before, nil); undone != nil && !errors.Is(undone, unix.ESRCH) {
		return fmt.Errorf("reset the file size limit of %s: %w", p.Name, undone)
	}
	return err
}

// managerOf returns a target's manager; nil if the target is not a manager.
func (w *world) managerOf(t *target) *stack.Manager {
	for i, each := range w.managerSet {
		if each == t {
			return w.managers[i]
		}
	}
	return nil
}
