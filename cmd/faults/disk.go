package main

import (
	"context"
	"errors"
	"fmt"
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

// diskFull lets a manager write to no file any more until it has noticed, and for a while
// longer: what NATS in it makes of a write that fails, for whatever reason, is what it
// makes of a full disk. When it can write again it has to get over that by itself.
func diskFull(ctx context.Context, w *world, t *target, e event) error {
	p, err := t.unit.there()
	if err != nil {
		return err
	}
	m := w.managerOf(t)
	full := unix.Rlimit{Cur: 1}
	var before unix.Rlimit
	if err := unix.Prlimit(p.PID(), unix.RLIMIT_FSIZE, nil, &before); err != nil {
		return fmt.Errorf("limit of what %s may write: %w", t.name, err)
	}
	full.Max = before.Max
	if err := unix.Prlimit(p.PID(), unix.RLIMIT_FSIZE, &full, nil); err != nil {
		return fmt.Errorf("have %s write nothing: %w", t.name, err)
	}
	const notices = 20 * time.Second // of looks every 5 s, which wait for 5 s
	within, cancel := context.WithTimeout(ctx, notices)
	defer cancel()
	missed := stack.Poll(within, t.name+" is not ready", func(ctx context.Context) error {
		if m.Ready(ctx) == nil {
			return errMissed
		}
		return nil
	})
	waited := wait(ctx, e.length)
	if err := unix.Prlimit(p.PID(), unix.RLIMIT_FSIZE, &before, nil); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("have %s write again: %w", t.name, err)
	}
	if missed != nil || waited != nil {
		return errors.Join(errMissed, missed, waited)
	}
	const recovers = 90 * time.Second // half a minute after the last time, and with other faults in the way
	within, cancel = context.WithTimeout(ctx, recovers)
	defer cancel()
	return stack.Poll(within, t.name+" is ready again", m.Ready)
}

func (w *world) managerOf(t *target) *stack.Manager {
	for i, each := range w.managerSet {
		if each == t {
			return w.managers[i]
		}
	}
	return nil
}
