package caller_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/optest"
)

// An old copy of NATS's store is put back while the server is down. The manager notices,
// and what the copy does not know of is neither taken for not done nor done twice.
func TestStoreRollsBack(t *testing.T) {
	t.Parallel()
	dir, log := t.TempDir(), &optest.Violations{}
	r, g := &optest.Rig{NATS: bustest.Server(t, embedded.Options{StoreDir: dir})}, optest.NewGate(t)
	g.Release()
	r.Conn = bustest.Connect(t, bus.Config{URLs: []string{r.NATS.URL()}})
	var err error
	r.Caller, err = caller.New(r.Conn, caller.Config{Cluster: optest.Cluster, Operations: &caller.StreamConfig{}, Logger: log.Logger()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Caller.Close)
	rep := r.Replica(t, g.Handle)
	// One that does not lead leaves the stream to the one that does.
	standby := optest.NewCaller(t, bustest.Connect(t, bus.Config{URLs: []string{r.NATS.URL()}}), caller.Config{
		Operations: &caller.StreamConfig{}, Epoch: func() uint64 { return 0 },
	})
	optest.WantOK(t, bustest.Receive(t, "a create", optest.Call(t.Context(), r.Caller, optest.Create("before"))))
	bustest.Eventually(t, "the standby has the stream", func() bool {
		states := standby.Streams()

		return len(states) == 1 && states[0].Ready
	})
	setByHand(t, r.NATS.URL())
	store, old := filepath.Join(dir, "jetstream"), filepath.Join(t.TempDir(), "old")
	r.NATS.Stop()
	if err := os.CopyFS(old, os.DirFS(store)); err != nil {
		t.Fatal(err)
	}
	if err := r.NATS.Restart(); err != nil {
		t.Fatal(err)
	}
	bustest.Eventually(t, "the replica is back", func() bool { return r.Caller.Up() && rep.Conn.Up() })
	probes := make(chan struct{}, 99)
	raw := bustest.Raw(t, r.NATS.URL(), nats.MaxReconnects(0))
	lost := optest.Create("lost")
	bustest.Eventually(t, "a create that the copy does not know of", func() bool {
		_, err := r.Caller.Call(t.Context(), lost)

		return err == nil
	})
	if _, err := raw.Subscribe("mcm.v1."+optest.Cluster+".claim."+optest.Provider+".~probe", func(*nats.Msg) { probes <- struct{}{} }); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the manager looks at the stream, and writes after that
		bustest.Receive(t, "the manager's look at the stream", probes)
	}
	for len(g.Entered) > 0 {
		<-g.Entered
	}
	r.NATS.Stop()
	if err := os.RemoveAll(store); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(store, os.DirFS(old)); err != nil {
		t.Fatal(err)
	}
	if err := r.NATS.Restart(); err != nil {
		t.Fatal(err)
	}
	bustest.Eventually(t, "the rollback is noticed", func() bool {
		return r.Caller.Streams()[0].Rollbacks == 1 && strings.Contains(log.All(), "was rolled back")
	})
	bustest.Eventually(t, "the replica is back again", func() bool { return rep.Conn.Up() && r.Session(rep) != nil })
	lost.Recover, lost.Attempt = true, 1
	bustest.Eventually(t, "the outcome that was lost", func() bool {
		_, err := r.Caller.Call(t.Context(), lost)

		return err == nil
	})
	for len(g.Entered) > 0 {
		if task := <-g.Entered; !task.Request.GetRecover() {
			t.Error("it was done again without a look for what it made before")
		}
	}
	after := optest.Create("after")
	bustest.Eventually(t, "another create, once the stream is made again", func() bool {
		_, err := r.Caller.Call(t.Context(), after)

		return err == nil
	})
	if got := settings(t, r.NATS.URL()).Metadata["team"]; got != "ops" {
		t.Errorf("the stream that was made again has the setting %q, want what was set by hand", got)
	}
}

// setByHand sets what mcm has no word on.
func setByHand(tb testing.TB, url string) {
	tb.Helper()
	cfg := settings(tb, url)
	cfg.Metadata["team"] = "ops"
	js, err := jetstream.New(bustest.Raw(tb, url))
	if err != nil {
		tb.Fatal(err)
	}
	if _, err := js.UpdateStream(tb.Context(), cfg); err != nil {
		tb.Fatal(err)
	}
}

// settings are those of the operations stream.
func settings(tb testing.TB, url string) jetstream.StreamConfig {
	tb.Helper()
	js, err := jetstream.New(bustest.Raw(tb, url))
	if err != nil {
		tb.Fatal(err)
	}
	stream, err := js.Stream(tb.Context(), bus.StreamName(optest.Cluster, optest.Provider))
	if err != nil {
		tb.Fatal(err)
	}
	cfg := stream.CachedInfo().Config
	if cfg.Metadata == nil {
		cfg.Metadata = map[string]string{}
	}

	return cfg
}

// A manager that starts changes nothing of a stream that it has no word on.
func TestStreamKeepsWhatPeopleSet(t *testing.T) {
	t.Parallel()
	r := optest.NewStoredRig(t)
	g := optest.NewGate(t)
	g.Release()
	r.Replica(t, g.Handle)
	optest.WantOK(t, bustest.Receive(t, "a create", optest.Call(t.Context(), r.Caller, optest.Create("m"))))
	setByHand(t, r.NATS.URL())
	next := optest.NewCaller(t, bustest.Connect(t, bus.Config{URLs: []string{r.NATS.URL()}}), caller.Config{Operations: &caller.StreamConfig{}})
	bustest.Eventually(t, "another manager has the stream", func() bool {
		states := next.Streams()

		return len(states) == 1 && states[0].Ready
	})
	if got := settings(t, r.NATS.URL()).Metadata["team"]; got != "ops" {
		t.Errorf("the stream has the setting %q, want what was set by hand", got)
	}
}

// A standby leaves a stream that was deleted to the manager that leads: that one has noted the
// settings that people made.
func TestStandbyMakesNoStreamAgain(t *testing.T) {
	t.Parallel()
	r := &optest.Rig{NATS: bustest.Server(t, embedded.Options{StoreDir: t.TempDir()})}
	r.Conn = bustest.Connect(t, bus.Config{URLs: []string{r.NATS.URL()}})
	var epoch atomic.Uint64
	r.Caller = optest.NewCaller(t, r.Conn, caller.Config{Operations: &caller.StreamConfig{}, Epoch: epoch.Load})
	g := optest.NewGate(t)
	r.Replica(t, g.Handle)
	r.Ready(t) // none was there before, so it has made one
	js, err := jetstream.New(bustest.Raw(t, r.NATS.URL()))
	if err != nil {
		t.Fatal(err)
	}
	name := bus.StreamName(optest.Cluster, optest.Provider)
	if err := js.DeleteStream(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	bustest.Eventually(t, "the standby waits for the leader", func() bool {
		state := r.Caller.Streams()[0]

		return !state.Ready && strings.Contains(state.Problem, "the leading manager makes it again")
	})
	if _, err := js.Stream(t.Context(), name); !errors.Is(err, jetstream.ErrStreamNotFound) {
		t.Errorf("the stream: %v, want that there is none", err)
	}
	epoch.Store(1)
	r.Ready(t)
}
