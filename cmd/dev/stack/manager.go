package stack

import (
	"context"
	"fmt"
)

// A Manager is one mcm.
type Manager struct {
	*Process

	// Address is that of /healthz, /readyz and /metrics.
	Address string
	// NATSURL is its bus, embedded or external. It stays the same across Restart.
	NATSURL string
	// Store is the directory of the embedded NATS; empty if there is none.
	Store string
	site  *Site
}

// ManagerOptions configure mcm. Control is required.
type ManagerOptions struct {
	// Name of the process; empty means mcm.
	Name string
	// Control and Target are kubeconfig paths; no target means the control's.
	Control, Target string
	// Namespace to serve; empty means default.
	Namespace string
	// Cluster is the control plane's name on the bus; empty means default.
	Cluster string
	// NATSURL of an external bus; empty means the embedded one.
	NATSURL string
	// Unready makes StartManager wait only for /healthz, as the manager will not become
	// ready.
	Unready bool
	// Args are added to the command line, Env (as NAME=value) to the environment.
	Args, Env []string
}

// StartManager starts an mcm and returns when it is ready.
func (s *Site) StartManager(ctx context.Context, o ManagerOptions) (*Manager, error) {
	if o.Name == "" {
		o.Name = "mcm"
	}
	if o.Target == "" {
		o.Target = o.Control
	}
	m := &Manager{NATSURL: o.NATSURL, site: s}
	if o.NATSURL == "" {
		m.Store = s.path(o.Name + ".nats")
	}
	plan := func(ports []int) command {
		m.Address = Loopback(ports[0])
		args := []string{
			"--control-kubeconfig", o.Control, "--target-kubeconfig", o.Target, "--leader-elect=false",
			"--address", "127.0.0.1", "--port", fmt.Sprint(ports[0]),
		}
		if o.Namespace != "" {
			args = append(args, "--namespace", o.Namespace)
		}
		if o.Cluster != "" {
			args = append(args, "--cluster-name", o.Cluster)
		}
		if o.NATSURL != "" {
			args = append(args, "--nats-url", o.NATSURL)
		} else {
			m.NATSURL = "nats://" + Loopback(ports[1])
			args = append(args, "--nats-listen", Loopback(ports[1]), "--nats-store-dir", m.Store)
		}
		return command{name: o.Name, program: "mcm", args: append(args, o.Args...), env: o.Env}
	}
	p, _, err := s.startOnFreePorts(ctx, 2, plan, func(ctx context.Context, p *Process, _ []int) error {
		if o.Unready {
			return p.until(ctx, "/healthz says ok", func(ctx context.Context) error {
				return answersOK(ctx, "http://"+m.Address+"/healthz")
			})
		}
		return m.awaitReady(ctx, p)
	})
	if err != nil {
		return nil, err
	}
	m.Process = p
	return m, nil
}

// Restart runs the ended manager again with the same command line, and returns when it
// is ready.
func (m *Manager) Restart(ctx context.Context) error {
	p, err := m.site.Restart(m.Process)
	if err != nil {
		return err
	}
	m.Process = p
	return m.awaitReady(ctx, p)
}

func (m *Manager) awaitReady(ctx context.Context, p *Process) error {
	return p.until(ctx, "/readyz says ok", m.Ready)
}

// Ready requests /readyz once. It returns an error if the manager is not ready.
func (m *Manager) Ready(ctx context.Context) error {
	return answersOK(ctx, "http://"+m.Address+"/readyz")
}
