package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// rollBackStore restores the store of an embedded NATS to its state some seconds before,
// like a disk's snapshot. Claims that drivers hold are gone then.
func rollBackStore(ctx context.Context, w *world, t *target, e event) (err error) {
	m := w.managerOf(t)
	old, err := os.MkdirTemp(w.site.Dir(), "store-")
	if err != nil {
		return err
	}
	kept := filepath.Join(old, "kept")
	defer func() { err = errors.Join(err, os.RemoveAll(old)) }()
	if err := t.unit.down(func() error { return os.CopyFS(kept, os.DirFS(m.Store)) }); err != nil {
		return err
	}
	const patience = 30 * time.Second
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := stack.Poll(within, t.name+" is ready", m.Ready); err != nil {
		return errors.Join(errMissed, err)
	}
	// So that the rollback loses something.
	if err := errors.Join(w.rollout(ctx, identities[e.pick%len(identities)], e, 2), wait(ctx, e.length)); err != nil {
		return err
	}
	err = t.unit.down(func() error {
		if err := os.RemoveAll(m.Store); err != nil {
			return err
		}
		return os.CopyFS(m.Store, os.DirFS(kept))
	})
	if err != nil {
		return err
	}
	within, cancel = context.WithTimeout(ctx, patience)
	defer cancel()
	err = stack.Poll(within, t.name+" notices", shows("mcm_dispatch_operations_stream_rollbacks_total", m))
	if err != nil && ctx.Err() == nil {
		return errors.Join(errMissed, err)
	}
	return err
}
