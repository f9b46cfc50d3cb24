package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

const healthTimeout = 5 * time.Second

// serveHealth answers /healthz, /readyz and /metrics until the returned function is called. Ready
// says why the program is of no use at the moment, nil if it is: it is started for one driver, and a
// roll-out must not go on without that.
func serveHealth(
	ctx context.Context, address string, figures prometheus.Gatherer, ready func() error, log *slog.Logger,
) (end func(), err error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("--listen: %w (another program may use the address: choose another)", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		err := ready()
		if ctx.Err() != nil {
			err = errors.New("draining")
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)

			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(figures, promhttp.HandlerOpts{}))
	server := &http.Server{
		Handler: mux, ReadHeaderTimeout: healthTimeout, ReadTimeout: healthTimeout,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("health endpoint failed", "err", err)
		}
	}()
	log.Info("health endpoint", "url", "http://"+l.Addr().String(), "paths", "/healthz /readyz /metrics")

	return func() {
		_ = server.Close() // a client that still reads has had its time
		<-done
	}, nil
}
