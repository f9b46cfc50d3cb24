package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/cmd/internal/natsflags"
)

const (
	defaultURL = "nats://127.0.0.1:4222"
	anyCluster = "*"
	// defaultCluster is the default of mcm's --cluster-name.
	defaultCluster = "default"
	// defaultTimeout lets a replica miss one heartbeat and still be listed.
	defaultTimeout = 2*bus.SessionInterval + bus.SessionInterval*2/5
)

// environment lists the variables that are read for flags that are not set. The nats
// CLI and drivers use the same names.
var environment = []struct{ flag, variable string }{
	{"nats-url", "NATS_URL"},
	{"nats-creds", "NATS_CREDS"},
	{"nats-ca", "NATS_CA"},
	{"nats-cert", "NATS_CERT"},
	{"nats-key", "NATS_KEY"},
}

// connection holds the flags for NATS.
type connection struct {
	config  bus.Config
	url     string
	cluster string
	timeout time.Duration
}

func (c *connection) addFlags(root *cobra.Command) {
	f := root.PersistentFlags()
	f.StringVar(&c.url, "nats-url", defaultURL, "NATS servers, separated by commas")
	natsflags.Add(f, &c.config)
	for _, env := range environment {
		f.Lookup(env.flag).Usage += " (env " + env.variable + ")"
	}
	f.StringVar(&c.cluster, "cluster", anyCluster, "name of the control plane (mcm's --cluster-name); * for all on this bus")
	f.DurationVar(&c.timeout, "timeout", defaultTimeout, "how long to listen for heartbeats before printing")
	for _, name := range []string{"nats-url", "cluster", "timeout"} {
		mustComplete(root, name, cobra.NoFileCompletions)
	}
}

// connect reads the environment for flags that are not set, checks the flags, and
// connects.
func (c *connection) connect(cmd *cobra.Command) (*bus.Conn, error) {
	for _, env := range environment {
		if v := os.Getenv(env.variable); v != "" && !cmd.Flags().Changed(env.flag) {
			if err := cmd.Flags().Set(env.flag, v); err != nil {
				return nil, fmt.Errorf("%s: %w", env.variable, err)
			}
		}
	}
	if c.cluster != anyCluster {
		if err := bus.ValidToken("cluster", c.cluster); err != nil {
			return nil, fmt.Errorf("--cluster: %w", err)
		}
	}
	if c.timeout <= 0 {
		return nil, fmt.Errorf("--timeout %s: want a positive duration such as %s", c.timeout, defaultTimeout)
	}
	cfg := c.config
	cfg.URLs = []string{c.url}
	cfg.Name, cfg.FailFast, cfg.InboxPrefix = "mcmctl", true, bus.OperatorInbox
	cfg.Logger = slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: slog.LevelWarn}))

	return bus.Connect(cmd.Context(), cfg)
}

// clusterText returns the value of --cluster for errors.
func (c *connection) clusterText() string {
	if c.cluster == anyCluster {
		return "any cluster"
	}

	return "cluster " + c.cluster
}

// untilInterrupted returns a context that Ctrl-C cancels, so that a command that
// follows the bus exits 0. A second Ctrl-C kills.
func untilInterrupted(cmd *cobra.Command) (context.Context, func()) {
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)

	return ctx, stop
}

// A view prints what was heard. It returns an error if what the user asked for does
// not exist.
type view func(w io.Writer, heard picture, now time.Time) error

// show listens for replicas and prints what was heard once, or with watch repeatedly
// until Ctrl-C.
func (c *connection) show(cmd *cobra.Command, watch bool, draw view) error {
	conn, err := c.connect(cmd)
	if err != nil {
		return err
	}
	defer conn.Close()
	heard := newFleet(c.cluster)
	stop, err := bus.WatchSessions(conn, c.cluster, heard.onSession)
	if err != nil {
		return err
	}
	defer stop()
	stopHellos, err := bus.WatchHello(conn, c.cluster, heard.onHello)
	if err != nil {
		return err
	}
	defer stopHellos()
	ask, stopAsking, err := asker(conn, heard)
	if err != nil {
		return err
	}
	defer stopAsking()
	if watch {
		return c.repeat(cmd, conn, heard, ask, draw)
	}
	for range 2 { // after the first half the control planes are known
		if err := ask(); err != nil {
			return err
		}
		select {
		case <-time.After(c.timeout / 2):
		case <-cmd.Context().Done():
			return errors.New("interrupted")
		}
	}
	now := time.Now()
	seen := heard.picture(now)
	if len(seen.replicas)+len(seen.outcomes)+len(seen.queues) == 0 {
		return fmt.Errorf("no driver replica of %s was heard within %s on %s: start a driver, check --nats-url, raise --timeout, "+
			"or name the control plane with --cluster, which also asks an mcm without drivers",
			c.clusterText(), c.timeout, conn.URL())
	}

	return draw(cmd.OutOrStdout(), seen, now)
}

// asker returns a function that asks the drivers for their figures and mcm for its
// newest outcomes.
func asker(conn *bus.Conn, heard *fleet) (ask func() error, stop func(), err error) {
	services, stopServices, err := bus.AskServices(conn, heard.onService)
	if err != nil {
		return nil, nil, err
	}
	outcomes, stopOutcomes, err := bus.AskOutcomes(conn, heard.onOutcome, heard.onWaiting)
	if err != nil {
		stopServices()

		return nil, nil, err
	}

	return func() error {
		errs := []error{services()}
		for _, cluster := range heard.known() {
			errs = append(errs, outcomes(cluster))
		}

		return errors.Join(errs...)
	}, func() { stopServices(); stopOutcomes() }, nil
}
