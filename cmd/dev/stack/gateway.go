package stack

import (
	"context"
	"fmt"
)

// A Gateway is one mcm-autoscaler.
type Gateway struct {
	*Process

	// Listen is the address for the cluster-autoscaler, Address that of /readyz and
	// /metrics. Both stay the same across Restart.
	Listen, Address string
	site            *Site
}

// StartGateway starts a gateway and returns when it is ready. args must include the flags
// for TLS.
func (s *Site) StartGateway(ctx context.Context, kubeconfig, namespace string, args ...string) (*Gateway, error) {
	g := &Gateway{site: s}
	plan := func(ports []int) command {
		g.Listen, g.Address = Loopback(ports[0]), Loopback(ports[1])
		return command{name: "mcm-autoscaler", program: "mcm-autoscaler", args: append([]string{
			"--kubeconfig", kubeconfig, "--namespace", namespace, "--listen", g.Listen,
			"--address", "127.0.0.1", "--port", fmt.Sprint(ports[1]), "-v=2",
		}, args...)}
	}
	p, _, err := s.startOnFreePorts(ctx, 2, plan, func(ctx context.Context, p *Process, _ []int) error { return g.awaitReady(ctx, p) })
	if err != nil {
		return nil, err
	}
	g.Process = p
	return g, nil
}

// Restart runs the ended gateway again and returns when it is ready.
func (g *Gateway) Restart(ctx context.Context) error {
	p, err := g.site.Restart(g.Process)
	if err != nil {
		return err
	}
	g.Process = p
	return g.awaitReady(ctx, p)
}

func (g *Gateway) awaitReady(ctx context.Context, p *Process) error {
	return p.until(ctx, "/readyz says ok", func(ctx context.Context) error {
		return answersOK(ctx, "http://"+g.Address+"/readyz")
	})
}
