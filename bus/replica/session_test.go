package replica_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// newSmallRig is a rig whose server takes messages up to size bytes.
func newSmallRig(t *testing.T, size string) *optest.Rig {
	t.Helper()
	file := filepath.Join(t.TempDir(), "nats.conf")
	if err := os.WriteFile(file, []byte("max_payload: "+size), 0o600); err != nil {
		t.Fatal(err)
	}
	r := &optest.Rig{NATS: bustest.Server(t, embedded.Options{ConfigFile: file})}
	r.Conn = bustest.Connect(t, bus.Config{URLs: []string{r.NATS.URL()}, Name: "mcm"})
	r.Caller = optest.NewCaller(t, r.Conn, caller.Config{})

	return r
}

// A session that does not fit must not make a working replica look dead: what
// people read goes first, then results that mcm can ask for, never what runs.
func TestSessionFits(t *testing.T) {
	t.Parallel()
	const ended = 40
	r, open := newSmallRig(t, "1500"), make(chan struct{})
	t.Cleanup(func() { close(open) })
	var runs atomic.Int32
	rep := r.Replica(t, func(_ context.Context, task *replica.Task) *driverv1.Result {
		runs.Add(1)
		if bus.MachineOf(task.Request).GetName() == "runs" {
			task.Progress(strings.Repeat("x", 100))
			<-open
		}

		return optest.Created(task)
	}, func(cfg *replica.Config) { cfg.Slots = 10 * ended })
	running := optest.Create("runs")
	optest.Call(t.Context(), r.Caller, running)
	bustest.Eventually(t, "progress in the session", func() bool {
		ops := r.Session(rep).GetOperations()

		return len(ops) == 1 && ops[0].GetLastProgress() != ""
	})
	var ids []string
	for range ended {
		req := optest.Create("ended")
		ids = append(ids, req.OperationID)
		optest.WantOK(t, bustest.Receive(t, "the outcome", optest.Call(t.Context(), r.Caller, req)))
	}
	sequence := r.Session(rep).GetSequence()
	bustest.Eventually(t, "a session after all of them", func() bool { return r.Session(rep).GetSequence() > sequence+1 })
	listed, settled := false, 0
	for _, op := range r.Session(rep).GetOperations() {
		if op.GetSettled() {
			settled++
		}
		listed = listed || op.GetOperationId() == running.OperationID
		if op.GetLastProgress() != "" {
			t.Errorf("progress %q of %s is still said", op.GetLastProgress(), op.GetOperationId())
		}
	}
	if !listed || settled == 0 || settled == ended {
		t.Errorf("the session lists %d of %d results, and what runs: %t; want some results and what runs", settled, ended, listed)
	}
	// What is not listed is not lost.
	for _, id := range ids {
		again := optest.Create("ended")
		again.OperationID, again.Recover, again.Attempt = id, true, 1
		bus.MachineOf(again.Body).Uid = strings.TrimSuffix(id, ".create.0")
		optest.WantOK(t, bustest.Receive(t, "the outcome once more", optest.Call(t.Context(), r.Caller, again)))
	}
	if n := runs.Load(); n != ended+1 {
		t.Errorf("the driver ran %d operations, want %d: some were run again", n, ended+1)
	}
}

func TestSessionThatCannotFitIsSaid(t *testing.T) {
	t.Parallel()
	var log optest.Violations
	r := newSmallRig(t, "500")
	conn := bustest.Connect(t, bus.Config{URLs: []string{r.NATS.URL()}, InboxPrefix: bus.InboxPrefix(optest.Provider)})
	server, err := replica.New(conn, replica.Config{
		Provider: optest.Provider, Hostname: strings.Repeat("h", 500), Logger: log.Logger(),
		Capabilities: []driverv1.Operation{driverv1.Operation_OPERATION_CREATE},
	}, replica.HandlerFunc(func(context.Context, *replica.Task) *driverv1.Result { return nil }))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	bustest.Eventually(t, "the reason and the remedy", func() bool { return strings.Contains(log.All(), "raise max_payload") })
	stop()
	if err := bustest.Receive(t, "the end of Run", done); err != nil {
		t.Error(err)
	}
	if n := strings.Count(log.All(), "session not sent"); n != 1 { // Run's last session makes two
		t.Errorf("said %d times, want once:\n%s", n, log.All())
	}
}

// "serving" is said once, and not before anybody can be served.
func TestServingIsSaidWhenConnected(t *testing.T) {
	t.Parallel()
	proxy := bustest.NewProxy(t, optest.NewRig(t).NATS.URL())
	proxy.Cut()
	var log optest.Violations
	said := func() int { return strings.Count(log.All(), "msg=serving") }
	conn, err := bus.Connect(t.Context(), bus.Config{URLs: []string{proxy.URL()}, Logger: bustest.Quiet()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	server, err := replica.New(conn, replica.Config{
		Provider: optest.Provider, Logger: slog.New(slog.NewTextHandler(&log, nil)),
		Capabilities: []driverv1.Operation{driverv1.Operation_OPERATION_CREATE},
	}, replica.HandlerFunc(func(context.Context, *replica.Task) *driverv1.Result { return nil }))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	if n := said(); n != 0 {
		t.Errorf("serving was said %d times without a connection", n)
	}
	proxy.Mend()
	bustest.Eventually(t, "serving", func() bool { return said() == 1 })
	proxy.Cut()
	bustest.Eventually(t, "the loss is noticed", func() bool { return !conn.Up() })
	proxy.Mend()
	bustest.Eventually(t, "the connection is back", conn.Up)
	if n := said(); n != 1 {
		t.Errorf("serving was said %d times", n)
	}
}

// A replica that was killed is believed alive for a while: no replica is busy then.
func TestKilledReplicaIsNotBusy(t *testing.T) {
	t.Parallel()
	r, g := optest.NewRig(t), optest.NewGate(t)
	rep := r.Replica(t, g.Handle)
	rep.Conn.Close() // leaves without a last session
	nc := bustest.Raw(t, r.NATS.URL())
	bustest.Eventually(t, "the server lets it go", func() bool {
		_, err := nc.Request("$SRV.PING."+bus.ServiceName(optest.Provider), nil, time.Second)

		return errors.Is(err, nats.ErrNoResponders)
	})
	_, err := r.Caller.Call(t.Context(), optest.Create("m"))
	optest.WantError(t, err, bus.OriginBus, driverv1.Code_CODE_UNAVAILABLE)
	if len(r.Caller.Replicas()) == 0 {
		return // this machine is so slow that its death is known already
	}
	if text := err.Error(); !strings.Contains(text, "no replica of provider virtual answers") {
		t.Errorf("error is %q, but the only replica is gone and not busy", text)
	}
}
