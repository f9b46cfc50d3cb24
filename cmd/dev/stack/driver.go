package stack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A Driver is one replica of a driver.
type Driver struct {
	*Process

	// Replica is its id on the bus.
	Replica string
}

// drainTimeout is how long a driver may finish its work when it is stopped.
const drainTimeout = 2 * time.Second

// DriverOptions configure a driver. Name and NATSURL are required.
type DriverOptions struct {
	// Name of the process.
	Name string
	// Program is the path of the driver; empty means driver-virtual.
	Program string
	// NATSURL is the bus.
	NATSURL string
	// Clusters are the control planes to serve; none means default.
	Clusters []string
	// Args are added to the command line, Env (as NAME=value) to the environment.
	Args, Env []string
}

// StartDriver starts a replica and returns when it sends sessions. Replicas must be
// started one after the other: the first new one on the bus is taken for this one.
func (s *Site) StartDriver(ctx context.Context, tap *Tap, o DriverOptions) (*Driver, error) {
	known := tap.Sessions()
	// By default a stopped driver finishes its work, which may take minutes.
	args := []string{"--nats-url", o.NATSURL, "--drain-timeout", drainTimeout.String()}
	if len(o.Clusters) > 0 {
		args = append(args, "--clusters", strings.Join(o.Clusters, ","))
	}
	p, err := s.start(command{name: o.Name, program: cmp.Or(o.Program, "driver-virtual"), args: append(args, o.Args...), env: o.Env})
	if err != nil {
		return nil, err
	}
	d, err := p.awaitSession(ctx, tap, known)
	if err != nil {
		return nil, fmt.Errorf("driver on %s: %w", o.NATSURL, err)
	}
	return d, nil
}

// awaitSession waits until a replica that is not in known sends sessions.
func (p *Process) awaitSession(ctx context.Context, tap *Tap, known map[string]*driverv1.Session) (*Driver, error) {
	d := &Driver{Process: p}
	return d, p.until(ctx, "it sends sessions", func(context.Context) error {
		for replica := range tap.Sessions() {
			if _, old := known[replica]; !old {
				d.Replica = replica
				return nil
			}
		}
		return errors.New("no new replica was heard")
	})
}
