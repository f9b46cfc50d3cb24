package caller_test

import (
	"strings"
	"testing"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/optest"
)

// A full disk stops creates, and what says so names stream, cause and remedy. When there
// is room again, the embedded server is restarted, and all goes on with what was claimed.
func TestFullDisk(t *testing.T) { //nolint:paralleltest // in a process of its own
	bustest.OnSmallDisk(t, "100m", func(t *testing.T, disk bustest.Disk) {
		t.Helper()
		r, g := &optest.Rig{NATS: bustest.Server(t, embedded.Options{StoreDir: disk.Dir})}, optest.NewGate(t)
		g.Release()
		r.Conn = bustest.Connect(t, bus.Config{URLs: []string{r.NATS.URL()}})
		r.Caller = optest.NewCaller(t, r.Conn, caller.Config{Operations: &caller.StreamConfig{Stuck: r.NATS.Mend}})
		other := optest.NewCaller(t, bustest.Connect(t, bus.Config{URLs: []string{r.NATS.URL()}}), caller.Config{Operations: &caller.StreamConfig{}})
		if err := r.Caller.Check(t.Context()); err != nil {
			t.Fatalf("before there is a driver: %v", err)
		}
		r.Replica(t, g.Handle)
		before := optest.Create("before")
		optest.WantOK(t, bustest.Receive(t, "a create", optest.Call(t.Context(), r.Caller, before)))

		disk.Fill(t)
		bustest.Eventually(t, "a create that finds no space", func() bool { // the last page on the disk takes a few
			_, err := r.Caller.Call(t.Context(), optest.Create("more"))

			return err != nil
		})
		ran := g.Runs.Load()
		wants := func(c *caller.Caller, parts ...string) {
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
		name := bus.StreamName(optest.Cluster, optest.Provider)
		wants(r.Caller, name, disk.Dir, "no space left", "free space", "mcm restarts its NATS server")
		wants(other, name, "takes no writes", "free space", "restart that server")
		for _, c := range []*caller.Caller{r.Caller, other} {
			if c.Streams()[0].Ready {
				t.Error("the stream is ready although it takes no writes")
			}
		}
		_, err := r.Caller.Call(t.Context(), optest.Create("meanwhile"))
		if !bus.NothingRan(err) || !strings.Contains(err.Error(), name) || g.Runs.Load() != ran {
			t.Errorf("a create meanwhile: %v, %d runs; want that nothing ran", err, g.Runs.Load())
		}

		disk.Free(t)
		for _, c := range []*caller.Caller{r.Caller, other} {
			bustest.Eventually(t, "the stream takes writes", func() bool { return c.Check(t.Context()) == nil })
		}
		bustest.Eventually(t, "a create, once the replica is back", func() bool {
			_, err := r.Caller.Call(t.Context(), optest.Create("after"))

			return err == nil
		})
		if c := r.ClaimOf(t, before); c.GetOperationId() != before.OperationID {
			t.Errorf("claim = %v, want what was stored before the disk was full", c)
		}
	})
}
