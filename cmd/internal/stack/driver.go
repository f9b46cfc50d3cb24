package stack

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A Driver is one replica of driver-virtual.
type Driver struct {
	*Process

	// Replica is its id on the bus.
	Replica string
}

// drainTimeout is how long a driver finishes its work when it is told to stop.
const drainTimeout = 2 * time.Second

// DriverOptions are what is told to a driver. Name and NATSURL are needed.
type DriverOptions struct {
	// Name of the process.
	Name string
	// NATSURL is where the bus is.
	NATSURL string
	// Clusters are the control planes to serve; none means default.
	Clusters []string
	// Args are added to the command line, Env (as NAME=value) to the environment.
	Args, Env []string
}

// StartDriver starts a replica and returns when it has shown itself on the bus.
// Replicas must be started one after the other: the one that is new there is
// taken for this.
func (s *Site) StartDriver(ctx context.Context, tap *Tap, o DriverOptions) (*Driver, error) {
	known := tap.Sessions()
	// By default a driver that is told to stop finishes what it does, for minutes.
	args := []string{"--nats-url", o.NATSURL, "--drain-timeout", drainTimeout.String()}
	if len(o.Clusters) > 0 {
		args = append(args, "--clusters", strings.Join(o.Clusters, ","))
	}
	p, err := s.start(command{name: o.Name, program: "driver-virtual", args: append(args, o.Args...), env: o.Env})
	if err != nil {
		return nil, err
	}
	d, err := p.heardOf(ctx, tap, known)
	if err != nil {
		return nil, fmt.Errorf("driver on %s: %w", o.NATSURL, err)
	}
	return d, nil
}

// heardOf waits until a replica sends sessions that is not known yet.
func (p *Process) heardOf(ctx context.Context, tap *Tap, known map[string]*driverv1.Session) (*Driver, error) {
	d := &Driver{Process: p}
	return d, p.until(ctx, "it sends sessions", func(context.Context) error {
		for replica := range tap.Sessions() {
			if _, old := known[replica]; !old {
				d.Replica = replica
				return nil
			}
		}
		return errors.New("no new replica was heard of")
	})
}
