package driversdk

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// hardStopLimit is how long operations get to return after a second signal and the
// manager to store their results.
const hardStopLimit = 10 * time.Second

// Serve runs d as one replica until ctx ends, and returns when nothing of it
// runs any more. It connects to NATS for ever: a bus that is not there yet, or
// goes away, is waited for.
//
// When ctx ends the replica takes no more work and lets running operations
// finish for cfg.DrainTimeout (the soft stop); then, or when the process gets an
// interrupt or a SIGTERM meanwhile, their contexts are cancelled (the hard stop).
// The result is nil unless the replica could not start, or operations ignored
// the hard stop for some seconds and were left behind.
func Serve[S any](ctx context.Context, cfg Config, d Driver[S]) error {
	cfg, err := cfg.Complete()
	if err != nil {
		return err
	}

	return serve(ctx, newProcess(cfg), d)
}

// A process is what [Serve] runs: one replica of a driver.
type process struct {
	name   string
	cfg    Config
	log    *slog.Logger
	server *replica.Server
	health health
	second chan os.Signal // signals that come while draining
}

// newProcess wants a complete configuration.
func newProcess(cfg Config) *process {
	// Unique among replicas and new with each process [SESSION-2].
	name := strings.ToLower(rand.Text())

	return &process{
		name: name, cfg: cfg, second: make(chan os.Signal, 1),
		log: cfg.Logger.With("provider", cfg.Provider, "replica", name),
	}
}

func serve[S any](ctx context.Context, r *process, d Driver[S]) error {
	m, err := newMetrics(r.cfg.Metrics)
	if err != nil {
		return err
	}
	conn, err := bus.Connect(ctx, r.natsConfig())
	if err != nil {
		return err
	}
	defer conn.Close()
	r.health.connected = conn.Up
	if err := m.watch(&r.health); err != nil {
		return err
	}
	m.slots.Set(float64(r.cfg.Slots))
	if r.cfg.Listen != "" {
		l, err := listenHealth(ctx, r.cfg.Listen)
		if err != nil {
			return err
		}
		defer serveHealth(l, r.health.handler(m.registry), r.log)()
	}

	fetch, err := bus.NewFetchClient(conn, r.cfg.Provider, r.cfg.ControlPlaneKeys, r.log)
	if err != nil {
		return err
	}
	// Operations outlive ctx: that is what draining is.
	hard, hardStop := context.WithCancel(context.WithoutCancel(ctx))
	defer hardStop()
	known := newClasses(fetch, specDecoder[S]{kind: r.cfg.Kind, apiVersions: r.cfg.APIVersions}, m)
	defer known.wait()
	h := newHandler(hard, d, known, m, r)
	server := r.serverConfig(h.capabilities(), m, known.changed)
	server.Seal = fetch.Seal
	r.server, err = replica.New(conn, server, h)
	if err != nil {
		return err
	}
	r.health.refusal = r.server.Refusal
	r.health.server.Store(r.server)

	return r.run(ctx, hardStop)
}

func (r *process) natsConfig() bus.Config {
	n := r.cfg.NATS

	return bus.Config{
		URLs: n.URLs, Name: "machinebus driver " + r.cfg.Provider + " " + r.name,
		Creds: n.Creds, CA: n.CA, Cert: n.Cert, Key: n.Key, AllowInsecure: n.AllowInsecure,
		InboxPrefix: bus.InboxPrefix(r.cfg.Provider), Logger: r.log,
	}
}

func (r *process) serverConfig(
	capabilities []driverv1.Operation, m *metrics, changed func(string, *driverv1.Changed),
) replica.Config {
	hostname, err := os.Hostname()
	if err != nil {
		r.log.Warn("cannot read the host name", "err", err)
	}

	return replica.Config{
		Provider: r.cfg.Provider, Clusters: r.cfg.Clusters, Replica: r.name,
		Version: r.cfg.Version, Hostname: hostname,
		Slots: r.cfg.Slots, DrainTimeout: r.cfg.DrainTimeout, HardStop: r.cfg.hardStop, StuckAfter: r.cfg.stuckAfter,
		CreateIdentity: r.cfg.CreateIdentity, SettleTime: r.cfg.SettleTime,
		Kind: r.cfg.Kind, APIVersions: r.cfg.APIVersions,
		Capabilities: capabilities,
		OnChanged:    changed, OnSettled: m.settled,
		Logger: r.cfg.Logger, // the server adds replica and provider itself
	}
}

// run serves until ctx ends, then drains, and stops hard at a second signal.
func (r *process) run(ctx context.Context, hardStop func()) error {
	done := make(chan error, 1)
	go func() { done <- withErrLeft(r.server.Run(ctx)) }()
	r.health.serving.Store(true)
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}

	r.health.draining.Store(true)
	signal.Notify(r.second, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(r.second)
	r.log.Info("stopping: finishing the running operations; a stop signal cancels them")
	select {
	case err := <-done:
		return err
	case s := <-r.second:
		r.log.Warn("stop signal while stopping: cancelling the running operations", "signal", s)
	}

	hardStop()
	wait := cmp.Or(r.cfg.hardStop, hardStopLimit)
	limit := time.NewTimer(wait)
	defer limit.Stop()
	select {
	case err := <-done:
		return err
	case <-limit.C:
		return fmt.Errorf("operations still ran %s after the hard stop: %w", wait, errLeft)
	}
}

// errLeft is wrapped when operations were left behind.
var errLeft = errors.New("the manager lets other replicas find out their outcome")

// withErrLeft adds to the bus's word on operations that were left behind what becomes
// of them.
func withErrLeft(err error) error {
	if errors.Is(err, replica.ErrLeft) {
		return fmt.Errorf("%w: %w", err, errLeft)
	}

	return err
}
