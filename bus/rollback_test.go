package bus_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
)

// An old copy of NATS's store is put back while the server is down. The manager notices,
// and what the copy does not know of is neither taken for not done nor done twice.
func TestStoreRollsBack(t *testing.T) {
	t.Parallel()
	dir, log := t.TempDir(), &violations{}
	r, g := &rig{srv: bustest.Server(t, embedded.Options{StoreDir: dir})}, newGate(t)
	g.release()
	r.conn = bustest.Connect(t, bus.Config{URLs: []string{r.srv.URL()}})
	var err error
	r.caller, err = bus.NewCaller(r.conn, bus.CallerConfig{Cluster: cluster, Operations: &bus.StreamConfig{}, Logger: log.logger()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.caller.Close)
	rep := r.replica(t, g.handle)
	wantOK(t, bustest.Receive(t, "a create", call(t.Context(), r.caller, create("before"))))
	store, old := filepath.Join(dir, "jetstream"), filepath.Join(t.TempDir(), "old")
	r.srv.Stop()
	if err := os.CopyFS(old, os.DirFS(store)); err != nil {
		t.Fatal(err)
	}
	if err := r.srv.Restart(); err != nil {
		t.Fatal(err)
	}
	bustest.Eventually(t, "the replica is back", func() bool { return r.caller.Up() && rep.conn.Up() })
	probes := make(chan struct{}, 99)
	raw := bustest.Raw(t, r.srv.URL(), nats.MaxReconnects(0))
	lost := create("lost")
	bustest.Eventually(t, "a create that the copy does not know of", func() bool {
		_, err := r.caller.Call(t.Context(), lost)

		return err == nil
	})
	if _, err := raw.Subscribe("mcm.v1."+cluster+".claim."+provider+".~probe", func(*nats.Msg) { probes <- struct{}{} }); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the manager looks at the stream, and writes after that
		bustest.Receive(t, "the manager's look at the stream", probes)
	}
	for len(g.entered) > 0 {
		<-g.entered
	}
	r.srv.Stop()
	if err := os.RemoveAll(store); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(store, os.DirFS(old)); err != nil {
		t.Fatal(err)
	}
	if err := r.srv.Restart(); err != nil {
		t.Fatal(err)
	}
	bustest.Eventually(t, "the rollback is noticed", func() bool {
		return r.caller.Streams()[0].Rollbacks == 1 && strings.Contains(log.all(), "was rolled back")
	})
	bustest.Eventually(t, "the replica is back again", func() bool { return rep.conn.Up() && r.session(rep) != nil })
	lost.Recover, lost.Attempt = true, 1
	bustest.Eventually(t, "the outcome that was lost", func() bool {
		_, err := r.caller.Call(t.Context(), lost)

		return err == nil
	})
	for len(g.entered) > 0 {
		if task := <-g.entered; !task.Request.GetRecover() {
			t.Error("it was done again without a look for what it made before")
		}
	}
	wantOK(t, bustest.Receive(t, "another create", call(t.Context(), r.caller, create("after"))))
}
