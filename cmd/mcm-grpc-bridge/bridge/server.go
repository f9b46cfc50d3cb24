package bridge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/machinebus/machinebus/cmd/mcm-grpc-bridge/infrapb"
	"github.com/machinebus/machinebus/driversdk"
	"github.com/machinebus/machinebus/driversdk/external"
)

const (
	// mostStreams bounds the streams, each of which has a NATS connection.
	mostStreams = 128
	// pingAfter and pingTimeout find a client whose host is gone or whose process is stopped.
	pingAfter, pingTimeout = 10 * time.Second, 10 * time.Second
	// stopLimit is for clients that do not close their connections.
	stopLimit = 5 * time.Second
	// longestName bounds what a client says of itself, in bytes.
	longestName = 253
)

// A Config says how replicas run and which there may be.
type Config struct {
	// Replica configures each replica, and is complete. What differs between them is set for each:
	// provider, logger and metrics. None has a health endpoint.
	Replica driversdk.Config
	// Kinds are the kinds of classes that drivers may serve.
	Kinds Kinds
}

// A Server serves both published forms of the protocol.
type Server struct {
	infrapb.UnimplementedInfragrpcServer

	cfg     Config
	log     *slog.Logger
	metrics *metrics
	ctx     context.Context // of Serve: replicas drain when it ends

	mu       sync.Mutex
	number   int // of the last stream
	streams  int
	stopping bool
	running  sync.WaitGroup // of streams; added to under mu while not stopping
}

// New returns a server.
func New(cfg Config) *Server {
	return &Server{cfg: cfg, log: cfg.Replica.Logger, metrics: newMetrics()}
}

// Gatherer returns the figures of the server and of each replica.
func (s *Server) Gatherer() prometheus.Gatherer { return s.metrics }

// Ready returns nil if the replica of a registered driver is connected to NATS, else why none is.
func (s *Server) Ready() error { return s.metrics.ready() }

// Serve serves drivers until ctx ends. Then their replicas drain: it takes no more drivers, and
// returns when those that there are have left. It may be called once.
func (s *Server) Serve(ctx context.Context, l net.Listener, options ...grpc.ServerOption) error {
	s.ctx = ctx
	server := grpc.NewServer(append(options,
		grpc.StatsHandler(connections{}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: pingAfter, Timeout: pingTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: pingAfter / 2, PermitWithoutStream: true}),
	)...)
	infrapb.RegisterInfragrpcServer(server, s)
	server.RegisterService(serviceForm(), s)
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	select {
	case err := <-done:
		server.Stop()

		return fmt.Errorf("serve drivers on %s: %w", l.Addr(), err)
	case <-ctx.Done():
	}
	s.mu.Lock()
	s.stopping = true
	s.mu.Unlock()
	s.running.Wait()
	// The clients' last messages may still be on their way.
	hard := time.AfterFunc(stopLimit, server.Stop)
	defer hard.Stop()
	server.GracefulStop()

	return <-done
}

// Register serves one client until it leaves.
func (s *Server) Register(client infrapb.Infragrpc_RegisterServer) error {
	number, err := s.enter()
	if err != nil {
		return err
	}
	defer s.leave()
	log := s.log.With("stream", number, "client", clientOf(client.Context()))
	st := newStream(client)
	err = s.serve(st, number, log)
	st.end(err)
	if errors.Is(err, errClosed) {
		log.Info("driver has left")

		return nil
	}
	log.Warn("stream of a driver ended", "err", err)
	if _, ok := status.FromError(err); ok {
		return err
	}

	return status.Error(codes.Unavailable, err.Error())
}

// serve registers the client and runs its replica. The error says why it ended, and is never nil.
func (s *Server) serve(st *stream, number int, log *slog.Logger) error {
	said, err := st.register()
	if err == nil {
		err = s.check(said)
	}
	if err != nil {
		s.metrics.registered("refused")

		return err
	}
	s.metrics.registered("accepted")
	cfg := s.cfg.Replica
	cfg.Provider, cfg.Listen = s.cfg.Kinds[said.GetKind()], ""
	cfg.Logger, cfg.Metrics = log.With("kind", said.GetKind()), prometheus.NewRegistry()
	log.Info("driver registered", "kind", said.GetKind(), "provider", cfg.Provider)
	defer s.metrics.addReplica(cfg.Metrics, number, said.GetKind(), cfg.Provider)()

	return s.serveReplica(st, cfg, external.New(classTypeOf(said), provider{st, st.ctx}))
}

// serveReplica runs the replica until it or the stream ends, and sends for it meanwhile.
func (s *Server) serveReplica(st *stream, cfg driversdk.Config, driver *external.Driver) error {
	defer connectionOf(st.ctx).attach(driver)()
	// The replica drains when the bridge stops, which needs the stream, and when the stream has ended.
	ctx, stop := context.WithCancel(s.ctx)
	defer stop()
	defer context.AfterFunc(st.ctx, stop)()
	ended := make(chan error, 1)
	go func() { ended <- external.Serve(ctx, cfg, driver) }()
	for {
		select {
		case m := <-st.outbox:
			if err := st.grpc.Send(m); err != nil {
				st.end(err)
			}
		case err := <-ended:
			switch {
			case st.ctx.Err() != nil:
				return st.why()
			case err != nil:
				return fmt.Errorf("the replica failed: %w", err)
			default:
				return status.Error(codes.Unavailable, "the bridge is stopping: register again")
			}
		}
	}
}

// check refuses a registration that no replica can be made of.
func (s *Server) check(said *infrapb.DriverSideRegisterationResp) error {
	for _, name := range []string{said.GetKind(), said.GetGroup(), said.GetVersion()} {
		if len(name) > longestName {
			return status.Errorf(codes.InvalidArgument, "kind, group or version is longer than %d bytes", longestName)
		}
	}
	if s.cfg.Kinds[said.GetKind()] == "" {
		return status.Errorf(codes.FailedPrecondition, "kind %q has no provider here: start the bridge with --kind=%s=<provider>, or register one of %s",
			said.GetKind(), said.GetKind(), s.cfg.Kinds)
	}

	return nil
}

func classTypeOf(said *infrapb.DriverSideRegisterationResp) external.ClassType {
	return external.ClassType{
		APIVersion: cmp.Or(said.GetGroup(), "machine.sapcloud.io") + "/" + cmp.Or(said.GetVersion(), "v1alpha1"),
		Kind:       said.GetKind(),
	}
}

// GetMachineClass returns the class of an operation on this connection.
func (s *Server) GetMachineClass(ctx context.Context, in *infrapb.MachineClassMeta) (*infrapb.MachineClass, error) {
	meta := &external.MachineClassMeta{Name: in.GetName(), Revision: in.GetRevision()}
	data, refusal := s.read(ctx, "class", func(d *external.Driver) (string, error) {
		class, err := d.GetMachineClass(meta)
		text, _ := class.(string)

		return text, err
	})

	return &infrapb.MachineClass{Data: data, Error: refusal}, nil
}

// GetSecret returns the secret of an operation on this connection.
func (s *Server) GetSecret(ctx context.Context, in *infrapb.SecretMeta) (*infrapb.Secret, error) {
	meta := &external.SecretMeta{SecretName: in.GetSecretName(), SecretNameSpace: in.GetNameSpace(), Revision: in.GetRevision()}
	data, refusal := s.read(ctx, "secret", func(d *external.Driver) (string, error) { return d.GetSecret(meta) })

	return &infrapb.Secret{Data: data, Error: refusal}, nil
}

// read asks the drivers of a call's connection. A refusal is a text in the answer, as it was in 2018:
// clients pass it on as the error of their operation, where a gRPC status would count as the cloud's.
func (s *Server) read(ctx context.Context, what string, ask func(*external.Driver) (string, error)) (data, refusal string) {
	refusal = "no driver is registered on this connection: call Register on it first"
	for _, d := range connectionOf(ctx).all() {
		text, err := ask(d)
		if err == nil {
			return text, ""
		}
		refusal = err.Error()
	}
	s.metrics.refused(what)

	return "", refusal
}

func (s *Server) enter() (number int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.stopping:
		return 0, status.Error(codes.Unavailable, "the bridge is stopping")
	case s.streams >= mostStreams:
		return 0, status.Errorf(codes.ResourceExhausted, "%d drivers are registered, and more cannot be: start another bridge", mostStreams)
	}
	s.running.Add(1)
	s.streams++
	s.number++

	return s.number, nil
}

func (s *Server) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.streams--
	s.running.Done()
}

// clientOf names a client for the log.
func clientOf(ctx context.Context) string {
	if p, ok := peer.FromContext(ctx); ok {
		name := p.Addr.String()
		if info, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(info.State.PeerCertificates) > 0 {
			name += " with the certificate of " + info.State.PeerCertificates[0].Subject.String()
		}

		return name
	}

	return "unknown"
}
