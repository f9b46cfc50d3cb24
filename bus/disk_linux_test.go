package bus_test

import (
	"strings"
	"testing"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
)

// A full disk stops creates, and what says so names stream, cause and remedy. When there
// is room again, the embedded server is restarted, and all goes on with what was claimed.
func TestFullDisk(t *testing.T) { //nolint:paralleltest // in a process of its own
	bustest.OnSmallDisk(t, "100m", func(t *testing.T, disk bustest.Disk) {
		t.Helper()
		r, g := &rig{srv: bustest.Server(t, embedded.Options{StoreDir: disk.Dir})}, newGate(t)
		g.release()
		r.conn = bustest.Connect(t, bus.Config{URLs: []string{r.srv.URL()}})
		r.caller = newCaller(t, r.conn, bus.CallerConfig{Operations: &bus.StreamConfig{Stuck: r.srv.Mend}})
		other := newCaller(t, bustest.Connect(t, bus.Config{URLs: []string{r.srv.URL()}}), bus.CallerConfig{Operations: &bus.StreamConfig{}})
		if err := r.caller.Check(t.Context()); err != nil {
			t.Fatalf("before there is a driver: %v", err)
		}
		r.replica(t, g.handle)
		before := create("before")
		wantOK(t, bustest.Receive(t, "a create", call(t.Context(), r.caller, before)))

		disk.Fill(t)
		bustest.Eventually(t, "a create that finds no space", func() bool { // the last page on the disk takes a few
			_, err := r.caller.Call(t.Context(), create("more"))

			return err != nil
		})
		ran := g.runs.Load()
		wants := func(c *bus.Caller, parts ...string) {
			t.Helper()
			var err error
			defer func() { t.Logf("it says: %v", err) }()
			bustest.Eventually(t, strings.Join(parts, ", "), func() bool {
				err = c.Check(t.Context())
				for _, part := range parts {
					if err == nil || !strings.Contains(err.Error(), part) {
						return false
					}
				}

				return true
			})
		}
		name := bus.StreamName(cluster, provider)
		wants(r.caller, name, disk.Dir, "no space left", "free space", "restarts its NATS server by itself")
		wants(other, name, "takes no writes", "free space", "restart that server")
		for _, c := range []*bus.Caller{r.caller, other} {
			if c.Streams()[0].Ready {
				t.Error("the stream is ready although it takes no writes")
			}
		}
		_, err := r.caller.Call(t.Context(), create("meanwhile"))
		if !bus.NothingRan(err) || !strings.Contains(err.Error(), name) || g.runs.Load() != ran {
			t.Errorf("a create meanwhile: %v, %d runs; want that nothing ran", err, g.runs.Load())
		}

		disk.Free(t)
		for _, c := range []*bus.Caller{r.caller, other} {
			bustest.Eventually(t, "the stream takes writes", func() bool { return c.Check(t.Context()) == nil })
		}
		bustest.Eventually(t, "a create, once the replica is back", func() bool {
			_, err := r.caller.Call(t.Context(), create("after"))

			return err == nil
		})
		if c := r.claimOf(t, before); c.GetOperationId() != before.OperationID {
			t.Errorf("claim = %v, want what was stored before the disk was full", c)
		}
	})
}
