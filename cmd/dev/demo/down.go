package main

import (
	"context"
	"errors"
	"slices"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// down ends exactly the processes that up started. It may be repeated.
func down(ctx context.Context, n *narrator, p paths) error {
	release, err := p.lock("up", "another make up or make down is running: wait for it to end")
	if err != nil {
		return err
	}
	defer release()
	st, err := readState(p.state())
	if err != nil {
		return err
	}
	alive := st.alive()
	if len(alive) == 0 && st.Cluster == nil {
		n.plainf("nothing is up")
		return st.remove()
	}
	if st.Cluster != nil && st.Cluster.Foreign {
		if err := cleanForeign(ctx, n, *st.Cluster); err != nil {
			return err
		}
	}
	var errs []error
	for _, process := range slices.Backward(alive) {
		n.detailf("ending %s (process %d)", process.Name, process.PID)
		errs = append(errs, process.Stop())
	}
	if err := errors.Join(errs...); err != nil {
		return err // keep the state for another try
	}
	n.detailf("everything has ended")
	return st.remove()
}

func cleanForeign(ctx context.Context, n *narrator, c cluster) error {
	kube, err := stack.NewClient(c.Kubeconfig)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, stopLimit)
	defer cancel()
	return c.clean(ctx, n, kube)
}
