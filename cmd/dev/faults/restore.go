package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// restoreEtcd restores etcd to its state some seconds before, like a backup. Machines
// created since are gone and leave their instances; Machines deleted since are back. mcm
// is down meanwhile, as an administrator would arrange.
func restoreEtcd(ctx context.Context, w *world, _ *target, e event) (err error) {
	if !w.due(e) {
		return errMissed
	}
	backup, err := os.MkdirTemp(w.site.Dir(), "etcd-")
	if err != nil {
		return err
	}
	kept, data := filepath.Join(backup, "kept"), w.cluster.EtcdDir()
	defer func() { err = errors.Join(err, os.RemoveAll(backup)) }()
	err = w.withoutAPI(ctx, func() error { return os.CopyFS(kept, os.DirFS(data)) })
	if err != nil {
		return err
	}
	const least = 5 * time.Second // for machines to come and go
	if err := wait(ctx, max(least, e.length)); err != nil {
		return err
	}
	restore := func() error {
		var before map[types.UID]*v1alpha1.Machine
		// Changes that the witness has not seen would be lost.
		err := w.soon(ctx, "the witness has seen all changes of Machines", func(ctx context.Context) error {
			s, err := w.look(ctx)
			if err != nil {
				return err
			}
			before = s.machines
			return w.witness.caughtUp(s.machines)
		})
		if err != nil {
			return err
		}
		err = w.withoutAPI(ctx, func() error {
			return errors.Join(os.RemoveAll(data), os.CopyFS(data, os.DirFS(kept)))
		})
		if err != nil {
			return err
		}
		return w.beginAgain(ctx, before)
	}
	for _, t := range w.managerSet {
		next := restore
		restore = func() error { return t.unit.down(next) }
	}
	return restore()
}

// withoutAPI calls do while the API server and etcd are down.
func (w *world) withoutAPI(ctx context.Context, do func() error) error {
	if err := w.cluster.Failure(); err != nil {
		return err
	}
	if err := w.cluster.Kill(); err != nil {
		return err
	}
	return errors.Join(do(), w.cluster.Restart(context.WithoutCancel(ctx)))
}

// beginAgain passes the existing Machines to the witness, and restarts its watch from the
// beginning. The judge has to wait longer from now on: a Node that was registered after
// the backup does not come back, and its machine fails only after its creation timeout.
// It returns [errMissed] if the Machines have not changed.
func (w *world) beginAgain(ctx context.Context, before map[types.UID]*v1alpha1.Machine) error {
	var machines v1alpha1.MachineList
	err := stack.Poll(ctx, "the restored Machines are listed", func(ctx context.Context) error {
		return w.kube.List(ctx, &machines, client.InNamespace(w.name))
	})
	if err != nil {
		return err
	}
	there := map[types.UID]bool{}
	for i := range machines.Items {
		there[machines.Items[i].UID] = true
	}
	w.witness.restored(there)
	w.followAgain()
	w.patience = healLimit + creationTimeout
	if unchanged(before, machines.Items) {
		return errMissed
	}
	return nil
}

// unchanged reports whether Machines have the same versions as before.
func unchanged(before map[types.UID]*v1alpha1.Machine, now []v1alpha1.Machine) bool {
	return len(before) == len(now) && !slices.ContainsFunc(now, func(m v1alpha1.Machine) bool {
		return before[m.UID] == nil || before[m.UID].ResourceVersion != m.ResourceVersion
	})
}
