package caller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/internal/opstream"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// Whatever the model's network and stream are asked, a nats-server answers alike.
func TestModelStreamIsLikeJetStream(t *testing.T) {
	t.Parallel()
	want := contractCalls()
	t.Run("nats-server", func(t *testing.T) {
		t.Parallel()
		for _, js := range []bool{true, false} {
			t.Run(fmt.Sprintf("JetStream=%t", js), func(t *testing.T) {
				t.Parallel()
				opts := embedded.Options{Listen: "127.0.0.1:0", Logger: slog.New(slog.DiscardHandler)}
				opts.StoreDir = t.TempDir()
				if !js {
					opts.StoreDir, opts.ConfigFile = "", filepath.Join(t.TempDir(), "nats.conf")
					if err := os.WriteFile(opts.ConfigFile, []byte("jetstream: disabled\n"), 0o600); err != nil {
						t.Fatal(err)
					}
				}
				srv, err := embedded.Start(opts)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(srv.Stop)
				conn, err := bus.Connect(t.Context(), bus.Config{URLs: []string{srv.URL()}, FailFast: true, Logger: opts.Logger})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(conn.Close)
				checkContract(t, conn, js, want)
			})
		}
	})
	t.Run("model", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			for _, js := range []bool{true, false} {
				n := newNetwork(1)
				n.server.off = !js
				ctx, cancel := context.WithCancel(t.Context())
				go n.run(ctx)
				checkContract(t, n.port("mcm", true), js, want)
				cancel()
			}
		})
	})
}

// A contractCall is one thing asked of NATS and what it has to come to.
type contractCall struct {
	name string
	ask  func(ctx context.Context, b contractBus) (uint64, error)
	seq  uint64
	err  error // errors.Is
	at   int64 // conflictOf; -1 for none
}

// A contractBus is the way to a stream.
type contractBus struct {
	ledger  opstream.Ledger
	streams *streams
}

// contractFirst is the sequence that a new stream's first record has.
const contractFirst = 7000

func contractCalls() []contractCall {
	claim, err := opstream.ClaimSubject("default", "virtual", "uid")
	if err != nil {
		panic(err) //nolint:forbidigo // of constants
	}
	mark := bus.Pattern("default", bus.TreeClaim, "virtual", "other-uid")
	env := &driverv1.Envelope{OperationId: "uid.create.0"}
	put := func(subject string, expected uint64, ttl time.Duration) func(context.Context, contractBus) (uint64, error) {
		return func(ctx context.Context, b contractBus) (uint64, error) {
			return b.ledger.Put(ctx, subject, env, expected, ttl)
		}
	}
	get := func(subject string) func(context.Context, contractBus) (uint64, error) {
		return func(ctx context.Context, b contractBus) (uint64, error) {
			r, err := b.ledger.Last(ctx, subject)
			if r == nil {
				return 0, err
			}
			if diff := cmp.Diff(env.GetOperationId(), r.Envelope.GetOperationId()); diff != "" {
				return 0, errors.New(diff)
			}

			return r.Sequence, err
		}
	}
	api := func(ask func(ctx context.Context, s *streams) error) func(context.Context, contractBus) (uint64, error) {
		return func(ctx context.Context, b contractBus) (uint64, error) { return 0, ask(ctx, b.streams) }
	}
	name := bus.StreamName("default", "virtual")
	gone := func(ctx context.Context, b contractBus) (uint64, error) {
		// The server removes what is over at its own pace.
		for range 100 {
			if r, err := b.ledger.Last(ctx, mark); err != nil || r == nil {
				return 0, err
			}
			if err := sleep(ctx, 100*time.Millisecond); err != nil {
				return 0, err
			}
		}

		return 0, errors.New("a record outlived its TTL by far")
	}

	return []contractCall{
		{name: "write without a stream", ask: put(claim, 0, 0), err: opstream.ErrNoStream, at: -1},
		{name: "read without a stream", ask: get(claim), err: opstream.ErrNoStream, at: -1},
		{name: "no such stream", ask: api(func(ctx context.Context, s *streams) error { return s.apiRequest(ctx, "STREAM.INFO."+name, nil, nil) }), err: opstream.ErrNoStream, at: -1},
		{name: "make it", ask: api(func(ctx context.Context, s *streams) error {
			return s.ensureStream(ctx, &stream{state: StreamState{Provider: "virtual", Name: name}})
		}), at: -1},
		{name: "make it again", ask: api(func(ctx context.Context, s *streams) error {
			return s.ensureStream(ctx, &stream{state: StreamState{Provider: "virtual", Name: name}})
		}), at: -1},
		{name: "it is new", ask: api(func(ctx context.Context, s *streams) error {
			age, err := s.age(ctx, &stream{state: StreamState{Provider: "virtual", Name: name}})
			if err == nil && (age < 0 || age > time.Minute) {
				err = fmt.Errorf("a stream made just now has an age of %s", age)
			}

			return err
		}), at: -1},
		{name: "nothing there", ask: get(claim), at: -1},
		{name: "expect something of nothing", ask: put(claim, 5, 0), err: opstream.ErrConflict, at: 0},
		{name: "first", ask: put(claim, 0, 0), seq: contractFirst, at: -1},
		{name: "read the first", ask: get(claim), seq: contractFirst, at: -1},
		{name: "first again", ask: put(claim, 0, 0), err: opstream.ErrConflict, at: contractFirst},
		{name: "another subject", ask: put(mark, 0, 3*time.Second), seq: contractFirst + 1, at: -1},
		{name: "replace", ask: put(claim, contractFirst, 0), seq: contractFirst + 2, at: -1},
		{name: "replace what was replaced", ask: put(claim, contractFirst, 0), err: opstream.ErrConflict, at: contractFirst + 2},
		{name: "read the second", ask: get(claim), seq: contractFirst + 2, at: -1},
		{name: "renew", ask: put(mark, contractFirst+1, time.Second), seq: contractFirst + 3, at: -1},
		{name: "its time is over", ask: gone, at: -1},
		{name: "renew what is over", ask: put(mark, contractFirst+3, time.Second), err: opstream.ErrConflict, at: 0},
		{name: "anew", ask: put(mark, 0, time.Second), seq: contractFirst + 4, at: -1},
		{name: "no limit stays", ask: get(claim), seq: contractFirst + 2, at: -1},
	}
}

func checkContract(t *testing.T, w bus.Wire, js bool, calls []contractCall) {
	t.Helper()
	q, err := opstream.NewInquirer(w)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	c := &Caller{conn: w, cfg: Config{Cluster: "default"}, inquirer: q}
	b := contractBus{
		ledger:  opstream.Ledger{Inquirer: q, Stream: bus.StreamName("default", "virtual")},
		streams: &streams{c: c, config: StreamConfig{first: func() uint64 { return contractFirst }}},
	}
	if !js {
		if err := b.streams.ensureStream(t.Context(), &stream{state: StreamState{Provider: "virtual", Name: "S"}}); !errors.Is(err, opstream.ErrNoJetStream) {
			t.Errorf("a stream without JetStream: %v, want %v", err, opstream.ErrNoJetStream)
		}
		calls = calls[:2]
	}
	for _, call := range calls {
		seq, err := call.ask(t.Context(), b)
		at := int64(-1)
		if there, known := opstream.ConflictOf(err); known {
			at = int64(there)
		}
		if seq != call.seq || (err == nil) != (call.err == nil) || !errors.Is(err, call.err) || at != call.at {
			t.Errorf("%s: %d, %v (conflict at %d), want %d, %v (%d)", call.name, seq, err, at, call.seq, call.err, call.at)
		}
	}
}
