package main

import (
	"context"
	"errors"
	"slices"

	"github.com/machinebus/machinebus/cmd/internal/stack"
)

// down ends exactly the processes that up started. It may be run at any time,
// and again.
func down(ctx context.Context, n *narrator, p paths) error {
	release, err := p.lock("up", "another make up or make down is at work: wait for it to end")
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
		n.tellf("ending %s (process %d)", process.Name, process.PID)
		errs = append(errs, process.Stop())
	}
	if err := errors.Join(errs...); err != nil {
		return err // the state stays, for another try
	}
	n.tellf("all is down")
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
