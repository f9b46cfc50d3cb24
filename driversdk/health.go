package driversdk

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const healthTimeout = 5 * time.Second

// health serves /healthz while the process works, /readyz while the replica takes
// operations, and /metrics.
type health struct {
	connected func() bool
	refusal   func() error                   // why no work is taken from managers, nil if it is; set before serving
	server    atomic.Pointer[replica.Server] // nil while starting
	serving   atomic.Bool
	draining  atomic.Bool
}

// refuses reports whether the replica takes no work from a manager that leads.
func (h *health) refuses() bool { return h.serving.Load() && h.refusal() != nil }

// ready returns nil when the replica takes operations, else why not.
func (h *health) ready() error {
	switch {
	case h.draining.Load():
		return errors.New("draining")
	case !h.connected():
		return errors.New("not connected to NATS")
	case !h.serving.Load():
		return errors.New("starting")
	}
	if err := h.refusal(); err != nil {
		return err
	}
	if server := h.server.Load(); server != nil {
		return server.Jammed() //nolint:wrapcheck // says it all
	}

	return nil
}

// stuck is how many calls of an operation ignore their deadlines.
func (h *health) stuck(op driverv1.Operation) int {
	if server := h.server.Load(); server != nil {
		return server.Stuck()[op]
	}

	return 0
}

func (h *health) handler(metrics *prometheus.Registry) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := h.ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)

			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{Registry: metrics}))

	return mux
}

// listenHealth takes the address, so that a replica that cannot be watched does
// not start.
func listenHealth(ctx context.Context, address string) (net.Listener, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("health endpoint cannot listen on %s: %w "+
			"(another replica may use the address: choose another --listen, or port 0 for a free one)", address, err)
	}

	return l, nil
}

// serveHealth answers until the returned function is called, which waits for
// answers under way.
func serveHealth(l net.Listener, h http.Handler, log *slog.Logger) (stop func()) {
	server := &http.Server{
		Handler: h, ReadHeaderTimeout: healthTimeout, ReadTimeout: healthTimeout,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := server.Serve(l); err != nil && !errors.Is(err, http.ErrServerClosed) {
			log.Error("health endpoint failed", "err", err)
		}
	}()
	log.Info("health endpoint", "url", "http://"+l.Addr().String(), "paths", "/healthz /readyz /metrics")

	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), healthTimeout) //nolint:forbidigo // the replica's has ended by now
		defer cancel()
		if err := server.Shutdown(ctx); err != nil {
			_ = server.Close() // a client that reads too slowly
		}
		<-done
	}
}
