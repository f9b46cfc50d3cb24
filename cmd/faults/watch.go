package main

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// watchMachines has a world's Machines watched until ctx ends. After a restart of the
// API server it is back long before any mcm: an informer waits longer and longer, and
// machines would come and go unseen.
func (w *world) watchMachines(ctx context.Context) error {
	const retry = 50 * time.Millisecond
	stream, err := w.listMachines(ctx)
	if err != nil {
		return fmt.Errorf("watch machines: %w", err)
	}
	w.keepers.Go(func() {
		for ctx.Err() == nil {
			if err == nil {
				w.follow(ctx, stream)
			}
			_ = wait(ctx, retry)
			stream, err = w.listMachines(ctx)
		}
		if err == nil {
			stream.Stop()
		}
	})
	return nil
}

// listMachines shows the witness what there is, and begins to watch from there.
func (w *world) listMachines(ctx context.Context) (watch.Interface, error) {
	const patience = 5 * time.Second
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var list v1alpha1.MachineList
	if err := w.kube.List(within, &list, client.InNamespace(w.name)); err != nil {
		return nil, err
	}
	w.witness.listed(list.Items)
	return w.kube.Watch(ctx, &v1alpha1.MachineList{}, client.InNamespace(w.name),
		&client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: list.ResourceVersion}})
}

// follow shows the witness what happens until the watch ends.
func (w *world) follow(ctx context.Context, stream watch.Interface) {
	defer stream.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case e, open := <-stream.ResultChan():
			m, ok := e.Object.(*v1alpha1.Machine)
			if !open || !ok { // it has ended, or tells an error
				return
			}
			w.witness.saw(m, e.Type == watch.Deleted)
		}
	}
}
