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

	"github.com/machinebus/machinebus/cmd/internal/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// restoreEtcd puts what the API server stores back to what it was some seconds before, as
// the restore of a backup does. Machines that came since are gone and leave their
// instances, those that went are back, and the journals of others are behind. mcm is down
// meanwhile, as one would have it.
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
		// What nobody has seen of the Machines would be lost.
		err := w.soon(ctx, "all that happened to Machines is known", func(ctx context.Context) error {
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

// withoutAPI does something while the API server and etcd are down.
func (w *world) withoutAPI(ctx context.Context, do func() error) error {
	if err := w.cluster.Failure(); err != nil {
		return err
	}
	if err := w.cluster.Kill(); err != nil {
		return err
	}
	return errors.Join(do(), w.cluster.Restart(context.WithoutCancel(ctx)))
}

// beginAgain shows the witness what etcd has by now, and has it follow that from the
// beginning. What the judge waits for may take longer from now on: a Node that was
// registered since the backup does not come back, and its machine has its creation timeout.
// It returns [errMissed] where the Machines are as they were before.
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

// unchanged reports whether Machines are in the versions that they were in before.
func unchanged(before map[types.UID]*v1alpha1.Machine, now []v1alpha1.Machine) bool {
	return len(before) == len(now) && !slices.ContainsFunc(now, func(m v1alpha1.Machine) bool {
		return before[m.UID] == nil || before[m.UID].ResourceVersion != m.ResourceVersion
	})
}
