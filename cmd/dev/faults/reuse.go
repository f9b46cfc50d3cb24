package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// namesOf returns the pools whose cloud allows each name only once.
func namesOf(w *world) []*target { return []*target{w.names} }

// reuseName removes a Machine by force, which leaves its instance, and creates another one
// of that name. The cloud refuses its instance until the old one is collected.
func reuseName(ctx context.Context, w *world, _ *target, e event) error {
	var old *v1alpha1.Machine
	err := w.soon(ctx, "a Machine of the pool runs", func(ctx context.Context) error {
		s, err := w.look(ctx)
		if err != nil {
			return err
		}
		if old = s.running(uniqueName, e.pick); old == nil {
			return errMissed
		}
		return nil
	})
	if err != nil {
		return err
	}
	w.witness.removed(string(old.UID))
	if err := w.removeByForce(ctx, old); err != nil {
		return err
	}
	again := &v1alpha1.Machine{
		// Without labels of its pool, for which it would be surplus.
		ObjectMeta: metav1.ObjectMeta{Namespace: old.Namespace, Name: old.Name},
		Spec:       v1alpha1.MachineSpec{Class: old.Spec.Class},
	}
	err = w.soon(ctx, "the name is used again", func(ctx context.Context) error { return w.kube.Create(ctx, again) })
	if err != nil {
		return err
	}
	const patience = 90 * time.Second // after that the judge waits for it
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err = stack.Poll(within, "machine "+again.Name+" runs again", func(ctx context.Context) error {
		s, err := w.look(ctx)
		if err != nil {
			return err
		}
		if m := s.machines[again.UID]; m == nil || m.Status.CurrentStatus.Phase != v1alpha1.MachineRunning {
			return fmt.Errorf("the old instance still exists: %t", len(s.instances[old.UID]) > 0)
		}
		return client.IgnoreNotFound(w.kube.Delete(ctx, again))
	})
	if err != nil {
		return errors.Join(errMissed, err)
	}
	return nil
}

// running returns a Running Machine of a pool; nil if there is none.
func (s *state) running(identity string, pick int) *v1alpha1.Machine {
	var all []*v1alpha1.Machine
	for _, m := range s.machines {
		if m.Labels[v1alpha1.LabelKeyMachineDeployment] == objectName(identity) && m.DeletionTimestamp == nil &&
			m.Status.CurrentStatus.Phase == v1alpha1.MachineRunning && len(s.instances[m.UID]) > 0 {
			all = append(all, m)
		}
	}
	if len(all) == 0 {
		return nil
	}
	return all[pick%len(all)]
}

// removeByForce removes a Machine's finalizers and deletes it before mcm adds them again.
func (w *world) removeByForce(ctx context.Context, m *v1alpha1.Machine) error {
	return w.soon(ctx, "the Machine is removed by force", func(ctx context.Context) error {
		err := w.kube.Patch(ctx, m.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`)))
		if err == nil {
			err = w.kube.Delete(ctx, m, client.Preconditions{UID: &m.UID})
		}
		return client.IgnoreNotFound(err)
	})
}

// endReused deletes the Machines that belong to no pool.
func (w *world) endReused(ctx context.Context) error {
	s, err := w.look(ctx)
	if err != nil {
		return err
	}
	for _, m := range s.machines {
		if m.Labels[v1alpha1.LabelKeyMachineDeployment] == "" {
			err = errors.Join(err, client.IgnoreNotFound(w.kube.Delete(ctx, m)))
		}
	}
	return err
}
