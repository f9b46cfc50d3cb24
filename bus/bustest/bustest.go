// Package bustest starts real NATS servers for tests, connects to them, and
// breaks the connections on purpose. It is for tests only: it knows nothing of
// operations, and it fakes nothing.
package bustest

import (
	"log/slog"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/embedded"
)

const (
	// patience bounds every wait of a test. It is far above what is waited for,
	// because build machines stall.
	patience = 30 * time.Second
	between  = 2 * time.Millisecond
)

// Quiet is a logger for what a test provokes.
func Quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// Server runs a server on a free port of 127.0.0.1 until the test ends. Options
// that are not set get values that suit tests.
func Server(tb testing.TB, opts embedded.Options) *embedded.Server {
	tb.Helper()
	if opts.Listen == "" {
		opts.Listen = "127.0.0.1:0"
	}
	if opts.Logger == nil {
		opts.Logger = Quiet()
	}
	srv, err := embedded.Start(opts)
	if err != nil {
		tb.Fatalf("start a NATS server: %v", err)
	}
	tb.Cleanup(srv.Stop)

	return srv
}

// Connect connects until the test ends.
func Connect(tb testing.TB, cfg bus.Config) *bus.Conn {
	tb.Helper()
	if cfg.Logger == nil {
		cfg.Logger = Quiet()
	}
	cfg.FailFast = true
	conn, err := bus.Connect(tb.Context(), cfg)
	if err != nil {
		tb.Fatalf("connect: %v", err)
	}
	tb.Cleanup(conn.Close)

	return conn
}

// Raw is a plain NATS client, to listen in on the bus or to speak out of turn.
func Raw(tb testing.TB, url string, opts ...nats.Option) *nats.Conn {
	tb.Helper()
	nc, err := nats.Connect(url, opts...)
	if err != nil {
		tb.Fatalf("connect a plain client: %v", err)
	}
	tb.Cleanup(nc.Close)

	return nc
}

// Eventually waits until ok holds, and fails the test with what when that takes
// unreasonably long.
func Eventually(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	tick := time.NewTicker(between)
	defer tick.Stop()
	limit := time.NewTimer(patience)
	defer limit.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-limit.C:
			tb.Fatalf("timed out waiting for: %s", what)
		}
	}
}

// Receive waits for something on a channel; a closed channel gives a zero value.
func Receive[T any](tb testing.TB, what string, ch <-chan T) T {
	tb.Helper()
	limit := time.NewTimer(patience)
	defer limit.Stop()
	select {
	case v := <-ch:
		return v
	case <-limit.C:
		tb.Fatalf("timed out waiting for: %s", what)
		panic("not reached") //nolint:forbidigo // Fatalf does not return
	}
}
