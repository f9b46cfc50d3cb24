package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/cmd/internal/stack"
	"github.com/machinebus/machinebus/driversdk"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	readCluster  = "bench"
	readProvider = "bench"
	peerSubject  = "peer.status"
	readTimeout  = time.Minute
	// readySoon bounds the waits for parts that only have to start.
	readySoon = 30 * time.Second
)

// A readRig is a server with both sides of the bus on it, and both sides of the
// peer. As deployed, the manager may be in the server's process, and drivers are
// at the other end of a socket.
type readRig struct {
	server  *embedded.Server
	caller  *caller.Caller
	peer    *nats.Conn
	request *driverv1.Envelope // as the peer sends it
	reply   *driverv1.Envelope
	options rigOptions
	secured []nats.Option  // of bare clients
	closers []func() error // called in reverse
}

// rigOptions say what is on the bus.
type rigOptions struct {
	inProcess bool    // the manager's connection
	pki       *pki    // nil for connections without TLS
	store     string  // folder of the operations stream; empty for none
	replicas  int     // of the driver; 0 for one
	provider  *slowly // what the driver's answers take; nil for nothing
}

func newReadRig(ctx context.Context, o rigOptions) (r *readRig, err error) {
	quiet := slog.New(slog.DiscardHandler)
	r = &readRig{options: o}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	listen := embedded.Options{Listen: stack.Loopback(0), StoreDir: o.store, Logger: quiet}
	if o.pki != nil {
		listen.ConfigFile = o.pki.config
	}
	r.server, err = embedded.Start(listen)
	if err != nil {
		return r, err
	}
	r.closing(r.server.Stop)

	cfg := bus.Config{URLs: []string{r.server.URL()}, Name: "bench", FailFast: true, Logger: quiet}
	var opts []nats.Option
	if o.inProcess {
		cfg.InProcess = r.server
		opts = append(opts, nats.InProcessServer(r.server))
	}
	if o.pki != nil {
		cfg.CA, cfg.Cert, cfg.Key = o.pki.ca, o.pki.cert, o.pki.key
		r.secured = []nats.Option{nats.RootCAs(o.pki.ca), nats.ClientCert(o.pki.cert, o.pki.key)}
		opts = append(opts, r.secured...)
	}
	conn, err := bus.Connect(ctx, cfg)
	if err != nil {
		return r, err
	}
	r.closing(conn.Close)
	asking := caller.Config{Cluster: readCluster, Operations: &caller.StreamConfig{Memory: r.server.InMemory()}, Logger: quiet}
	if r.caller, err = caller.New(conn, asking); err != nil {
		return r, err
	}
	r.closing(r.caller.Close)
	key, err := bus.NewSealKey()
	if err != nil {
		return r, err
	}
	fetches, err := bus.ServeFetches(conn, readCluster, key, readClass{}, quiet)
	if err != nil {
		return r, err
	}
	r.closing(fetches.Stop)
	for i := range max(1, o.replicas) {
		if err := r.startDriver(ctx, i+1, quiet); err != nil {
			return r, err
		}
	}
	err = r.startPeer(ctx, opts)
	return r, err
}

func (r *readRig) closing(f func()) {
	r.closers = append(r.closers, func() error { f(); return nil })
}

func (r *readRig) close() error {
	var errs []error
	for i := range r.closers {
		errs = append(errs, r.closers[len(r.closers)-1-i]())
	}
	r.closers = nil
	return errors.Join(errs...)
}

// startDriver serves with the SDK, and waits until the caller knows the replica.
func (r *readRig) startDriver(ctx context.Context, replicas int, log *slog.Logger) error {
	ctx, stop := context.WithCancel(ctx)
	at := driversdk.NATSConfig{URLs: []string{r.server.URL()}}
	if p := r.options.pki; p != nil {
		at.CA, at.Cert, at.Key = p.ca, p.cert, p.key
	}
	served := make(chan error, 1)
	go func() {
		served <- driversdk.Serve(ctx, driversdk.Config{
			Provider: readProvider, NATS: at,
			Clusters: []string{readCluster}, Slots: 4096, DrainTimeout: time.Second, Logger: log,
		}, &readDriver{takes: r.options.provider.another()})
	}()
	r.closers = append(r.closers, func() error { stop(); return <-served })
	ready, cancel := context.WithTimeoutCause(ctx, readySoon, fmt.Errorf("not within %s", readySoon))
	defer cancel()
	return stack.Poll(ready, "the driver is on the bus", func(context.Context) error {
		live := r.caller.Replicas()
		if len(live) < replicas {
			return errors.New("not yet")
		}
		return nil
	})
}

// startPeer has bare clients exchange what one call puts on the bus.
func (r *readRig) startPeer(ctx context.Context, opts []nats.Option) error {
	driver, err := nats.Connect(r.server.URL(), r.secured...)
	if err != nil {
		return err
	}
	r.closing(driver.Close)
	if r.peer, err = nats.Connect(r.server.URL(), opts...); err != nil {
		return err
	}
	r.closing(r.peer.Close)
	reply, err := r.listen(ctx, driver)
	if err != nil {
		return err
	}
	r.reply = reply
	_, err = driver.QueueSubscribe(peerSubject, "driver", func(m *nats.Msg) {
		if _, err := bus.Decode(m.Data, ""); err != nil {
			return // the caller times out and reports it
		}
		if payload, err := bus.Encode(reply, ""); err == nil {
			_ = m.Respond(payload) // as above
		}
	})
	if err != nil {
		return err
	}
	return driver.Flush()
}

// listen makes one call, and returns what came back on the bus; what was sent
// becomes the peer's request.
func (r *readRig) listen(ctx context.Context, conn *nats.Conn) (reply *driverv1.Envelope, err error) {
	seen := make(chan *nats.Msg, 8)
	tap, err := conn.ChanSubscribe("mcm.v1."+readCluster+".*."+readProvider+".>", seen)
	if err != nil {
		return nil, err
	}
	if err := conn.Flush(); err != nil {
		return nil, err
	}
	if err := r.callBus(ctx); err != nil {
		return nil, err
	}
	limit := time.NewTimer(readySoon)
	defer limit.Stop()
	for r.request == nil || reply == nil {
		select {
		case m := <-seen:
			env, err := bus.Decode(m.Data, "")
			switch {
			case err != nil:
				return nil, err
			case env.GetStatus() != nil:
				r.request = env
			case env.GetResult() != nil:
				reply = env
			}
		case <-limit.C:
			return nil, errors.New("a call's request and result were not seen on the bus")
		}
	}
	return reply, tap.Unsubscribe()
}

// callPeer is one request and reply by bare NATS.
func (r *readRig) callPeer(ctx context.Context) error {
	payload, err := bus.Encode(r.request, "")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	m, err := r.peer.RequestWithContext(ctx, peerSubject, payload)
	if err != nil {
		return err
	}
	_, err = bus.Decode(m.Data, "")
	return err
}

// callBus is one status operation.
func (r *readRig) callBus(ctx context.Context) error {
	_, err := r.caller.Call(ctx, caller.Request{
		Provider: readProvider, Namespace: "shop", Name: "worker-1-7d9f8-abcde", Timeout: readTimeout,
		OperationID: "read." + strconv.FormatUint(reads.Add(1), 10), Body: statusRequest(),
	})
	return err
}

// readClass serves the one class there is.
type readClass struct{}

func (readClass) Class(_ context.Context, provider string, req *driverv1.FetchClassRequest) (*driverv1.Class, error) {
	return &driverv1.Class{Reference: req.GetClass(), Provider: provider, ProviderSpec: []byte(`{"size":"small"}`)}, nil
}

func (readClass) Secret(context.Context, string, *driverv1.FetchSecretRequest) (*driverv1.SecretContent, error) {
	return nil, errors.New("the class has no secret")
}

func (readClass) Bootstrap(context.Context, string, *driverv1.FetchBootstrapRequest) (*driverv1.BootstrapContent, error) {
	return nil, errors.New("a status needs no bootstrap values")
}

// readSpec is the class's provider spec.
type readSpec struct {
	Size string `json:"size"`
}

// A readDriver answers at once: what is measured is the way there and back.
type readDriver struct{ takes *slowly }

func (d *readDriver) Get(ctx context.Context, req *driversdk.Request[readSpec]) (*driversdk.Instance, error) {
	if err := d.takes.wait(ctx); err != nil {
		return nil, err
	}
	if req.Machine.ProviderID == "" {
		return nil, driversdk.Errorf(driversdk.NotFound, "machine %s has no instance", req.Machine.Name)
	}
	return &driversdk.Instance{ProviderID: req.Machine.ProviderID, NodeName: req.Machine.NodeName, MachineName: req.Machine.Name}, nil
}

var errReadOnly = errors.New("this driver only answers status and create")

func (*readDriver) Delete(context.Context, *driversdk.Request[readSpec]) error { return errReadOnly }

func (*readDriver) List(context.Context, *driversdk.Class[readSpec]) ([]*driversdk.Instance, error) {
	return nil, errReadOnly
}
