package caller

import (
	"context"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/nats-io/nats.go"
)

// A manager that takes over wants to know the stream's age for each operation without
// a claim, all at once.
func TestAgeIsAskedForOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(1)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go n.run(ctx)
		p := n.port("mcm", true)
		var asked atomic.Int32
		tap, err := p.Subscribe("$JS.API.STREAM.INFO.*", "", func(*nats.Msg) { asked.Add(1) })
		if err != nil {
			t.Fatal(err)
		}
		c, err := New(p, Config{Cluster: "default", Operations: &StreamConfig{}, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		if err := c.awaitStream(ctx, "virtual"); err != nil {
			t.Fatal(err)
		}
		asked.Store(0)
		const many = 1000
		errs := make(chan error, many)
		for range many {
			go func() {
				_, err := c.streams.ageOf(ctx, "virtual")
				errs <- err
			}()
		}
		for range many {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
		if n := asked.Load(); n == 0 || n > 3 {
			t.Errorf("%d wanted to know the stream's age at a time, and it was asked for %d times", many, n)
		}
		c.Close()
		if err := tap.Unsubscribe(); err != nil {
			t.Error(err)
		}
	})
}
