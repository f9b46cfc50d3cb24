package stack

import (
	"context"
	"fmt"
	"net"
)

// A NATSServer is a nats-server of its own, as production has it. It is the
// unchanged program of github.com/nats-io/nats-server.
type NATSServer struct {
	*Process

	// URL stays the same across Restart.
	URL  string
	site *Site
	port int
}

// StartNATS starts a nats-server with JetStream on a free port.
func (s *Site) StartNATS(ctx context.Context) (*NATSServer, error) {
	p, ports, err := s.startOnFreePorts(ctx, 1,
		func(ports []int) command { return s.natsCommand("nats-server", ports[0]) },
		func(ctx context.Context, p *Process, ports []int) error { return listening(ctx, p, ports[0]) })
	if err != nil {
		return nil, err
	}
	return &NATSServer{Process: p, URL: "nats://" + Loopback(ports[0]), site: s, port: ports[0]}, nil
}

// Restart runs the stopped server again, on the same port and with the same
// stored data.
func (n *NATSServer) Restart(ctx context.Context) error {
	p, err := n.site.restart(n.Process)
	if err != nil {
		return err
	}
	n.Process = p
	return listening(ctx, p, n.port)
}

func (s *Site) natsCommand(name string, port int) command {
	return command{name: name, program: "nats-server", args: []string{
		"--addr", "127.0.0.1", "--port", fmt.Sprint(port), "--jetstream", "--store_dir", s.path(name + ".data"),
	}}
}

// listening waits until a process takes connections on a loopback port.
func listening(ctx context.Context, p *Process, port int) error {
	var dialer net.Dialer
	return p.until(ctx, "it listens on "+Loopback(port), func(ctx context.Context) error {
		conn, err := dialer.DialContext(ctx, "tcp", Loopback(port))
		if err != nil {
			return err
		}
		return conn.Close()
	})
}
