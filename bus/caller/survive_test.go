package caller_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestServerRestart(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		keep   bool
		most   int32
		reason string
	}{
		"with its store":    {keep: true, most: 1, reason: "claims are there as before"},
		"without its store": {most: 2, reason: "the stream is made again, and the claims are gone"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			r, g := &optest.Rig{NATS: bustest.Server(t, embedded.Options{StoreDir: dir})}, optest.NewGate(t)
			r.Conn = bustest.Connect(t, bus.Config{URLs: []string{r.NATS.URL()}})
			r.Caller = optest.NewCaller(t, r.Conn, caller.Config{Operations: &caller.StreamConfig{}})
			r.Replica(t, g.Handle)
			req := optest.Create("m")
			done := optest.Call(t.Context(), r.Caller, req)
			bustest.Receive(t, "the handler", g.Entered)
			r.Restart(t, dir, tc.keep)
			g.Release()
			var out *caller.Outcome
			bustest.Eventually(t, "the outcome is known", func() bool {
				got := bustest.Receive(t, "an answer", done)
				if bus.OriginOf(got.Err) == bus.OriginTimeout { // the server was away for longer; mcm asks again
					req.Recover, req.Attempt = true, got.Out.Attempts
					done = optest.Call(t.Context(), r.Caller, req)

					return false
				}
				out = optest.WantOK(t, got)

				return true
			})
			// An attempt that is attached to what runs is no run. What was at the cloud already has its outcome reported. Without its claim
			// it is unknown that it still counts: then one more attempt looks for it.
			runs := g.Runs.Load()
			if uint32(runs) > out.Attempts || runs > tc.most {
				t.Errorf("outcome = %+v after %d runs, want at most %d: %s", out, runs, tc.most, tc.reason)
			}
			if runs > 1 {
				if again := bustest.Receive(t, "the second attempt", g.Entered); !again.Request.GetRecover() || again.Request.GetOperationId() != req.OperationID {
					t.Errorf("second attempt = %+v, want the same operation with recover", again.Request)
				}
			}
			r.Ready(t)
			next := optest.Then(req, "initialize", "1")
			bustest.Eventually(t, "the machine's next operation", func() bool {
				got := bustest.Receive(t, "an answer", optest.Call(t.Context(), r.Caller, next))

				return got.Err == nil
			})
		})
	}
}

func TestStreamDeletedUnderUs(t *testing.T) {
	t.Parallel()
	r, g := optest.NewStoredRig(t), optest.NewGate(t)
	g.Release()
	r.Replica(t, g.Handle)
	req := optest.Create("m")
	optest.WantOK(t, bustest.Receive(t, "the outcome", optest.Call(t.Context(), r.Caller, req)))
	js, err := jetstream.New(bustest.Raw(t, r.NATS.URL()))
	if err != nil {
		t.Fatal(err)
	}
	name := bus.StreamName(optest.Cluster, optest.Provider)
	before, err := js.Stream(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	if err := js.DeleteStream(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	// The next operation finds out; until the stream is back, it waits.
	next := optest.Then(req, "initialize", "1")
	bustest.Eventually(t, "the machine's next operation", func() bool {
		return bustest.Receive(t, "an answer", optest.Call(t.Context(), r.Caller, next)).Err == nil
	})
	after, err := js.Stream(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	// By a chance that counts as none: what each could use in years is far less.
	const years = uint64(1e9)
	old, renewed := before.CachedInfo().State.FirstSeq, after.CachedInfo().State.FirstSeq
	if max(old, renewed)-min(old, renewed) < years {
		t.Errorf("the new stream's sequences from %d on may meet those of the old one from %d on", renewed, old)
	}
}

func TestStreamIsMadeSafe(t *testing.T) {
	t.Parallel()
	r, g := optest.NewStoredRig(t), optest.NewGate(t)
	r.Replica(t, g.Handle)
	r.Ready(t)
	nc := bustest.Raw(t, r.NATS.URL())
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := js.Stream(t.Context(), bus.StreamName(optest.Cluster, optest.Provider))
	if err != nil {
		t.Fatal(err)
	}
	cfg := stream.CachedInfo().Config
	if cfg.AllowRollup || !cfg.DenyPurge || !cfg.DenyDelete || cfg.MaxMsgsPerSubject != 1 || !cfg.AllowMsgTTL || !cfg.AllowDirect ||
		cfg.Discard != jetstream.DiscardNew || cfg.MaxBytes <= 0 || cfg.MaxMsgSize <= 0 || cfg.MaxAge <= 0 {
		t.Errorf("stream = %+v", cfg)
	}
	if err := stream.Purge(t.Context()); err == nil {
		t.Error("the stream can be purged")
	}
	m := nats.NewMsg("mcm.v1.default.claim.virtual.u")
	m.Header.Set("Nats-Rollup", "all")
	if _, err := js.PublishMsg(t.Context(), m); err == nil {
		t.Error("one message can wipe the stream")
	}
}

// A stream that fills up may hold more before it is full, where JetStream has the
// room, and is left as it is otherwise; where it has not, people hear of it once, while
// it still works.
func TestStreamFillsUp(t *testing.T) {
	t.Parallel()
	const record, half = 1<<20 - 1024, 32 << 20 // of what a stream may hold at first
	for name, tc := range map[string]struct {
		store string // JetStream's own limit
		fill  int
		limit int64
		says  []string
	}{
		"more room": {store: "1G", fill: half/record + 1, limit: 4 * half},
		"no room":   {store: "100M", fill: 2*half/record - 2, limit: 2 * half, says: []string{"cannot raise its limit", "nearly full"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "nats.conf")
			settings := fmt.Appendf(nil, "jetstream { store_dir: %q, max_file_store: %s }\n", t.TempDir(), tc.store)
			if err := os.WriteFile(file, settings, 0o600); err != nil {
				t.Fatal(err)
			}
			r, g := &optest.Rig{NATS: bustest.Server(t, embedded.Options{ConfigFile: file})}, optest.NewGate(t)
			g.Release()
			proxy := bustest.NewProxy(t, r.NATS.URL())
			r.Conn = bustest.Connect(t, bus.Config{URLs: []string{proxy.URL()}})
			log := &optest.Violations{}
			client, err := caller.New(r.Conn, caller.Config{Cluster: optest.Cluster, Operations: &caller.StreamConfig{}, Logger: log.Warnings()})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(client.Close)
			r.Caller = client
			r.Replica(t, g.Handle)
			r.Ready(t)
			js, err := jetstream.New(bustest.Raw(t, r.NATS.URL()))
			if err != nil {
				t.Fatal(err)
			}
			stream, err := js.Stream(t.Context(), bus.StreamName(optest.Cluster, optest.Provider))
			if err != nil {
				t.Fatal(err)
			}
			const edited = "somebody has edited it"
			cfg := stream.CachedInfo().Config
			cfg.Description = edited
			if _, err := js.UpdateStream(t.Context(), cfg); err != nil {
				t.Fatal(err)
			}
			for n := range tc.fill {
				if _, err := js.Publish(t.Context(), fmt.Sprintf("mcm.v1.default.claim.virtual.fill-%d", n), make([]byte, record)); err != nil {
					t.Fatal(err)
				}
			}
			said := func(what string) bool { return strings.Contains(log.All(), what) }
			for range 2 {
				proxy.Drop() // it looks at all streams when it is back
				bustest.Eventually(t, "what it holds is seen", func() bool {
					s := r.Caller.Streams()[0]

					return s.Ready && s.MaxBytes == tc.limit && s.Bytes >= int64(tc.fill*record) &&
						!slices.ContainsFunc(tc.says, func(what string) bool { return !said(what) })
				})
			}
			req := optest.Create("m")
			bustest.Eventually(t, "a create, once the connection is back", func() bool {
				_, err := r.Caller.Call(t.Context(), req)

				return err == nil
			})
			info, err := stream.Info(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if info.Config.Description != edited || info.Config.MaxBytes != tc.limit {
				t.Errorf("the stream is %q and may hold %d, want it to hold %d and nothing else to be changed", info.Config.Description, info.Config.MaxBytes, tc.limit)
			}
			for _, what := range []string{"cannot raise its limit", "nearly full"} {
				want := 0
				if slices.Contains(tc.says, what) {
					want = 1
				}
				if got := strings.Count(log.All(), what); got != want {
					t.Errorf("%q was said %d times, want %d: %s", what, got, want, log.All())
				}
			}
		})
	}
}

// Without JetStream nothing is created or deleted, and what says so names the remedy.
func TestWithoutJetStream(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "nats.conf")
	if err := os.WriteFile(file, []byte("jetstream: disabled\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := &optest.Rig{NATS: bustest.Server(t, embedded.Options{ConfigFile: file})}
	log := &optest.Violations{}
	r.Conn = bustest.Connect(t, bus.Config{URLs: []string{r.NATS.URL()}})
	client, err := caller.New(r.Conn, caller.Config{Cluster: optest.Cluster, Operations: &caller.StreamConfig{}, Logger: log.Warnings()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	r.Caller = client
	g := optest.NewGate(t)
	g.Release()
	r.Replica(t, g.Handle)
	const remedy = "no JetStream for this user: enable it"
	bustest.Eventually(t, "it is known", func() bool {
		states := r.Caller.Streams()

		return len(states) == 1 && !states[0].Ready && strings.Contains(states[0].Problem, remedy)
	})
	_, err = r.Caller.Call(t.Context(), optest.Create("m"))
	optest.WantError(t, err, bus.OriginBus, driverv1.Code_CODE_UNAVAILABLE)
	if !strings.Contains(err.Error(), remedy) || !strings.Contains(log.All(), remedy) || g.Runs.Load() != 0 {
		t.Errorf("%v after %d runs, want that nothing has run and %q, here and in the log: %s", err, g.Runs.Load(), remedy, log.All())
	}
	optest.WantOK(t, bustest.Receive(t, "a read", optest.Call(t.Context(), r.Caller, optest.Status("m"))))
}

// A Caller without operations streams does reads only.
func TestReadsOnly(t *testing.T) {
	t.Parallel()
	r, g := optest.NewStoredRig(t), optest.NewGate(t)
	g.Release()
	r.Replica(t, g.Handle)
	reader, err := caller.New(r.Conn, caller.Config{Cluster: optest.Cluster, Logger: bustest.Quiet()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(reader.Close)
	optest.WantOK(t, bustest.Receive(t, "a read", optest.Call(t.Context(), reader, optest.Status("m"))))
	_, err = reader.Call(t.Context(), optest.Create("m"))
	optest.WantError(t, err, bus.OriginBus, driverv1.Code_CODE_INVALID_ARGUMENT)
	if !strings.Contains(err.Error(), "CallerConfig.Operations") || g.Runs.Load() != 1 {
		t.Errorf("%v after %d runs, want that the Caller has no operations streams", err, g.Runs.Load())
	}
}

func TestClaimRace(t *testing.T) {
	t.Parallel()
	r := optest.NewStoredRig(t)
	var mu sync.Mutex
	runs := map[string]int{}
	open := make(chan struct{})
	handle := func(_ context.Context, task *replica.Task) *driverv1.Result {
		mu.Lock()
		runs[task.Request.GetOperationId()]++
		mu.Unlock()
		<-open

		return optest.Created(task)
	}
	reps := []*optest.Replica{r.Replica(t, handle, slots(100)), r.Replica(t, handle, slots(100))}
	r.Ready(t)
	// The same attempt at both, as a duplicating network would have it.
	nc := bustest.Raw(t, r.NATS.URL())
	const machines = 20
	busy, accepted := make(chan *driverv1.Envelope, 2*machines), make(chan *driverv1.Envelope, 2*machines)
	reply := "mcm.v1." + optest.Cluster + ".reply." + optest.Provider + ".test."
	_, err := nc.Subscribe(reply+"*", func(m *nats.Msg) {
		env, err := bus.Decode(m.Data, "")
		switch {
		case err != nil:
		case env.GetBusy() != nil:
			busy <- env
		case env.GetAccepted() != nil:
			accepted <- env
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	for range machines {
		req := optest.Create("m")
		sequence := uint64(0)
		payload, err := bus.Encode(&driverv1.Envelope{
			OperationId: req.OperationID, Attempt: 1, Body: req.Body.GetBody(), ClaimTerms: &driverv1.ClaimTerms{Sequence: &sequence},
		}, "")
		if err != nil {
			t.Fatal(err)
		}
		for _, rep := range reps {
			subject := "mcm.v1." + optest.Cluster + ".replica." + optest.Provider + "." + rep.Replica() + ".create.shop.m"
			if err := nc.PublishRequest(subject, reply+"x", payload); err != nil {
				t.Fatal(err)
			}
		}
	}
	for range machines {
		bustest.Receive(t, "one that is accepted", accepted)
		if reason := bustest.Receive(t, "one that is refused", busy).GetBusy().GetReason(); reason != driverv1.BusyReason_BUSY_REASON_CLAIM {
			t.Errorf("refused for %v, want the claim", reason)
		}
	}
	close(open)
	bustest.Eventually(t, "all have run", func() bool { mu.Lock(); defer mu.Unlock(); return len(runs) == machines })
	mu.Lock()
	defer mu.Unlock()
	for id, n := range runs {
		if n != 1 {
			t.Errorf("operation %s ran %d times", id, n)
		}
	}
}

func slots(n int) func(*replica.Config) { return func(cfg *replica.Config) { cfg.Slots = n } }

func TestManySessionsFit(t *testing.T) {
	t.Parallel()
	r, g := optest.NewStoredRig(t), optest.NewGate(t)
	const many = 6000
	rep := r.Replica(t, g.Handle, slots(many))
	r.Ready(t)
	nc := bustest.Raw(t, r.NATS.URL())
	for range many {
		req, none := optest.Create(strings.Repeat("m", 60)), uint64(0)
		payload, err := bus.Encode(&driverv1.Envelope{
			OperationId: req.OperationID, Attempt: 1, Body: req.Body.GetBody(), ClaimTerms: &driverv1.ClaimTerms{Sequence: &none},
		}, "")
		if err != nil {
			t.Fatal(err)
		}
		subject := "mcm.v1." + optest.Cluster + ".replica." + optest.Provider + "." + rep.Replica() + ".create.shop.m"
		if err := nc.PublishRequest(subject, "mcm.v1."+optest.Cluster+".reply."+optest.Provider+".test.x", payload); err != nil {
			t.Fatal(err)
		}
		<-g.Entered
	}
	bustest.Eventually(t, "a session that is cut short", func() bool {
		s := r.Session(rep)

		return s.GetOmitted() > 0 && int(s.GetOmitted())+len(s.GetOperations()) == many
	})
}

func TestLowerEpochIsRefused(t *testing.T) {
	t.Parallel()
	r, g := optest.NewStoredRig(t), optest.NewGate(t)
	g.Release()
	rep := r.Replica(t, g.Handle)
	announcer, err := bus.NewAnnouncer(r.Conn, optest.Cluster)
	if err != nil {
		t.Fatal(err)
	}
	if err := announcer.Hello(&driverv1.Hello{Mcm: "new", Epoch: 7}); err != nil {
		t.Fatal(err)
	}
	bustest.Eventually(t, "the replica has heard", func() bool { return r.Session(rep).GetEpoch() == 7 })
	_, err = r.Caller.Call(t.Context(), optest.Create("m"))
	optest.WantError(t, err, bus.OriginTimeout, driverv1.Code_CODE_ABORTED) // who leads may have it done
	leading := optest.NewCaller(t, bustest.Connect(t, bus.Config{URLs: []string{r.NATS.URL()}}),
		caller.Config{Operations: &caller.StreamConfig{}, Epoch: func() uint64 { return 7 }})
	req := optest.Create("n")
	optest.WantOK(t, bustest.Receive(t, "the leader's operation", optest.Call(t.Context(), leading, req)))
	if c := r.ClaimOf(t, req); c.GetEpoch() != 7 {
		t.Errorf("claim = %v, want epoch 7", c)
	}
	if n := g.Runs.Load(); n != 1 {
		t.Errorf("ran %d times, want 1", n)
	}
}

// A replica that hangs takes requests and answers nothing, while its sessions come:
// its claim, which is not there, tells that it has begun nothing.
func TestMuteReplica(t *testing.T) {
	t.Parallel()
	r, g := optest.NewStoredRig(t), optest.NewGate(t)
	g.Release()
	asked := make(chan struct{}, 9)
	impostor(t, r, "mute", func(m *nats.Msg) *driverv1.Envelope {
		if strings.Contains(m.Subject, ".driver.") {
			asked <- struct{}{}
		}

		return nil
	})
	req := optest.Create("m")
	done := optest.Call(t.Context(), r.Caller, req)
	bustest.Receive(t, "the request", asked)
	good := r.Replica(t, g.Handle)
	for range 20 { // at the mute one, or at nobody, it is not done
		got := bustest.Receive(t, "an answer", done)
		if got.Err == nil {
			if got.Out.Replica != good.Replica() || g.Runs.Load() != 1 {
				t.Errorf("outcome = %+v after %d runs, want one at %s", got.Out, g.Runs.Load(), good.Replica())
			}

			return
		}
		req.Recover, req.Attempt = true, max(1, got.Out.Attempts)
		done = optest.Call(t.Context(), r.Caller, req)
	}
	t.Error("the operation never went to the replica that answers")
}

// A replica whose clock is ahead takes nothing, and fails nothing.
func TestClockAhead(t *testing.T) {
	t.Parallel()
	r, g := optest.NewStoredRig(t), optest.NewGate(t)
	g.Release()
	asked := make(chan struct{}, 99)
	impostor(t, r, "ahead", func(*nats.Msg) *driverv1.Envelope {
		asked <- struct{}{}

		return &driverv1.Envelope{Body: &driverv1.Envelope_Busy{Busy: &driverv1.Busy{Reason: driverv1.BusyReason_BUSY_REASON_STALE}}}
	})
	_, err := r.Caller.Call(t.Context(), optest.Create("m"))
	optest.WantError(t, err, bus.OriginBus, driverv1.Code_CODE_UNAVAILABLE)
	if !strings.Contains(err.Error(), "compare its clock") {
		t.Errorf("error = %q, want one that names the clock", err)
	}
	good := r.Replica(t, g.Handle, func(cfg *replica.Config) { cfg.Slots = 100 })
	for len(asked) > 0 {
		<-asked
	}
	for range 10 { // the queue group gives about half of them to the one that is ahead
		out := optest.WantOK(t, bustest.Receive(t, "the outcome", optest.Call(t.Context(), r.Caller, optest.Create("m"))))
		if out.Replica != good.Replica() || out.Attempts != 1 {
			t.Errorf("outcome = %+v, want one attempt at the replica whose clock is right", out)
		}
	}
	if len(asked) == 0 {
		t.Error("the replica that is ahead was never asked")
	}
}

// impostor sends the sessions of a replica and answers its requests by hand; nil
// for not at all.
func impostor(t *testing.T, r *optest.Rig, id string, answer func(*nats.Msg) *driverv1.Envelope) {
	t.Helper()
	nc := bustest.Raw(t, r.NATS.URL())
	take := func(m *nats.Msg) {
		env, err := bus.Decode(m.Data, "")
		frame := answer(m)
		if err != nil || frame == nil {
			return
		}
		frame.OperationId, frame.Attempt, frame.Replica = env.GetOperationId(), env.GetAttempt(), id
		if payload, err := bus.Encode(frame, ""); err == nil {
			_ = m.Respond(payload) // what waits for it fails
		}
	}
	_, err := nc.QueueSubscribe("mcm.v1."+optest.Cluster+".driver."+optest.Provider+".>", "driver", take)
	if err != nil {
		t.Fatal(err)
	}
	if _, err = nc.Subscribe("mcm.v1."+optest.Cluster+".replica."+optest.Provider+"."+id+".>", take); err != nil || nc.Flush() != nil {
		t.Fatal(err)
	}
	payload, err := bus.Encode(&driverv1.Envelope{Body: &driverv1.Envelope_Session{Session: &driverv1.Session{
		Cluster: optest.Cluster, Provider: optest.Provider, Replica: id, Slots: 1 << 20,
		Capabilities:   []driverv1.Operation{driverv1.Operation_OPERATION_CREATE},
		CreateIdentity: driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN,
	}}}, "")
	if err != nil {
		t.Fatal(err)
	}
	lives := time.NewTicker(bus.SessionInterval)
	t.Cleanup(lives.Stop)
	ended := t.Context().Done()
	go func() {
		for {
			if nc.Publish("mcm.v1."+optest.Cluster+".session."+optest.Provider+"."+id, payload) != nil {
				return
			}
			select {
			case <-lives.C:
			case <-ended:
				return
			}
		}
	}()
	bustest.Eventually(t, "its session", func() bool { return len(r.Caller.Replicas()) == 1 })
}
