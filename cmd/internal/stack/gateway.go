package stack

import (
	"context"
	"fmt"
)

// A Gateway is one mcm-autoscaler.
type Gateway struct {
	*Process

	// Listen is where the cluster-autoscaler connects, Address where /readyz and
	// /metrics are. Both stay the same across Restart.
	Listen, Address string
	site            *Site
}

// StartGateway starts a gateway and returns when it is ready. args must say who may
// connect.
func (s *Site) StartGateway(ctx context.Context, kubeconfig, namespace string, args ...string) (*Gateway, error) {
	g := &Gateway{site: s}
	plan := func(ports []int) command {
		g.Listen, g.Address = Loopback(ports[0]), Loopback(ports[1])
		return command{name: "mcm-autoscaler", program: "mcm-autoscaler", args: append([]string{
			"--kubeconfig", kubeconfig, "--namespace", namespace, "--listen", g.Listen,
			"--address", "127.0.0.1", "--port", fmt.Sprint(ports[1]), "-v=2",
		}, args...)}
	}
	p, _, err := s.startOnFreePorts(ctx, 2, plan, func(ctx context.Context, p *Process, _ []int) error { return g.getsReady(ctx, p) })
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
	return g.getsReady(ctx, p)
}

func (g *Gateway) getsReady(ctx context.Context, p *Process) error {
	return p.until(ctx, "/readyz says ok", func(ctx context.Context) error {
		return answersOK(ctx, "http://"+g.Address+"/readyz")
	})
}
