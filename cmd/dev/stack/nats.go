package stack

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"

	"github.com/machinebus/machinebus/bus/chaos"
)

// A NATSServer is an external nats-server, the unchanged program of
// github.com/nats-io/nats-server.
type NATSServer struct {
	*Process

	// URL stays the same across Restart.
	URL  string
	site *Site
	port int
}

// StartNATS starts a nats-server with JetStream on a free port.
func (s *Site) StartNATS(ctx context.Context) (*NATSServer, error) {
	return s.startNATS(ctx, s.natsCommand)
}

// StartCoreNATS is StartNATS without JetStream.
func (s *Site) StartCoreNATS(ctx context.Context) (*NATSServer, error) {
	return s.startNATS(ctx, func(name string, port int, _ ...string) command {
		return command{name: name, program: "nats-server", args: []string{"--addr", "127.0.0.1", "--port", fmt.Sprint(port)}}
	})
}

func (s *Site) startNATS(ctx context.Context, plan func(name string, port int, more ...string) command) (*NATSServer, error) {
	p, ports, err := s.startOnFreePorts(ctx, 1,
		func(ports []int) command { return plan("nats-server", ports[0]) },
		func(ctx context.Context, p *Process, ports []int) error { return awaitListening(ctx, p, ports[0]) })
	if err != nil {
		return nil, err
	}
	return &NATSServer{Process: p, URL: "nats://" + Loopback(ports[0]), site: s, port: ports[0]}, nil
}

// Restart runs the stopped server again with the same port and data.
func (n *NATSServer) Restart(ctx context.Context) error {
	p, err := n.site.Restart(n.Process)
	if err != nil {
		return err
	}
	n.Process = p
	return awaitListening(ctx, p, n.port)
}

// Wipe deletes the data of the ended server.
func (n *NATSServer) Wipe() error { return os.RemoveAll(n.site.natsStore(n.Name)) }

func (s *Site) natsStore(name string) string { return s.path(name + ".data") }

func (s *Site) natsCommand(name string, port int, more ...string) command {
	return command{name: name, program: "nats-server", args: append([]string{
		"--addr", "127.0.0.1", "--port", fmt.Sprint(port), "--jetstream", "--store_dir", s.natsStore(name),
	}, more...)}
}

// A NATSCluster is a cluster of nats-servers.
type NATSCluster struct {
	Servers []*NATSServer
	// Pairs are the links between each two servers. The servers use the link of the one
	// that connected first.
	Pairs []NATSPair
}

// A NATSPair connects two servers of a cluster: Up leads from the first to the second,
// and Down back.
type NATSPair struct{ Up, Down *chaos.Link }

// URL returns the URLs of all servers, separated by commas.
func (c *NATSCluster) URL() string {
	urls := make([]string, 0, len(c.Servers))
	for _, n := range c.Servers {
		urls = append(urls, n.URL)
	}
	return strings.Join(urls, ",")
}

// nowhere is a port without a listener. Servers advertise it to each other, so that they
// cannot bypass the links.
const nowhere = 1

// StartNATSCluster starts a cluster of n servers with links between each two of them.
// Servers do not advertise each other to clients.
func (s *Site) StartNATSCluster(ctx context.Context, n int) (*NATSCluster, error) {
	ports, err := freePorts(2 * n)
	if err != nil {
		return nil, err
	}
	c := &NATSCluster{}
	routes := make([][]string, n)
	for i := range n {
		routes[i] = append(routes[i], "nats://"+Loopback(ports[n+i])) // a server's routes must include itself
		for j := range i {
			pair := NATSPair{}
			if pair.Up, err = chaos.OpenLink(ctx, Loopback(ports[n+i])); err != nil {
				return nil, err
			}
			if pair.Down, err = chaos.OpenLink(ctx, Loopback(ports[n+j])); err != nil {
				return nil, err
			}
			c.Pairs = append(c.Pairs, pair)
			routes[j] = append(routes[j], "nats://"+pair.Up.Address())
			routes[i] = append(routes[i], "nats://"+pair.Down.Address())
		}
	}
	for i := range n {
		name := fmt.Sprintf("nats-server-%d", i+1)
		args := []string{
			"--server_name", name, "--cluster_name", "stack", "--cluster", "nats://" + Loopback(ports[n+i]),
			"--cluster_advertise", Loopback(nowhere), "--no_advertise",
			"--routes", strings.Join(routes[i], ","),
		}
		p, err := s.start(s.natsCommand(name, ports[i], args...))
		if err != nil {
			return nil, err
		}
		if err := awaitListening(ctx, p, ports[i]); err != nil {
			return nil, err
		}
		c.Servers = append(c.Servers, &NATSServer{Process: p, URL: "nats://" + Loopback(ports[i]), site: s, port: ports[i]})
	}
	return c, nil
}

// Close closes the links.
func (c *NATSCluster) Close() {
	for _, p := range c.Pairs {
		p.Up.Close()
		p.Down.Close()
	}
}

// awaitListening waits until a process accepts connections on a loopback port.
func awaitListening(ctx context.Context, p *Process, port int) error {
	var dialer net.Dialer
	return p.until(ctx, "it listens on "+Loopback(port), func(ctx context.Context) error {
		conn, err := dialer.DialContext(ctx, "tcp", Loopback(port))
		if err != nil {
			return err
		}
		return conn.Close()
	})
}
