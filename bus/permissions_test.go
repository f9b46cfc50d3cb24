package bus_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/optest"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// driverPermissions are the least that mcm, and a driver of provider virtual, need
// for control plane default.
const driverPermissions = `
authorization {
  users = [
    { user: root, password: root }
    { user: mcm, password: mcm, permissions: {
      subscribe: { allow: [
        "mcm.v1.default.reply.*.*.*", "mcm.v1.default.session.*.*", "mcm.v1.default.hello",
        "mcm.v1.default.fetch.*.* mcm", "_INBOX_mcm.>"
      ] }
      publish: { allow: [
        "mcm.v1.default.driver.>", "mcm.v1.default.replica.>", "mcm.v1.default.plain.>", "mcm.v1.default.hello",
        "mcm.v1.default.changed.*", "mcm.v1.default.audit.>", "_INBOX_driver.>", "mcm.v1.default.claim.*.*",
        "$JS.API.STREAM.INFO.*", "$JS.API.STREAM.CREATE.*", "$JS.API.STREAM.UPDATE.*", "$JS.API.STREAM.DELETE.*",
        "$JS.API.DIRECT.GET.*.mcm.v1.default.>"
      ] }
    } }
    { user: driver, password: driver, permissions: {
      subscribe: { allow: [
        "mcm.v1.default.driver.virtual.> driver", "mcm.v1.default.replica.virtual.>", "mcm.v1.default.hello",
        "mcm.v1.default.changed.virtual", "_INBOX_driver.virtual.>",
        "$SRV.PING", "$SRV.INFO", "$SRV.STATS",
        "$SRV.*.mcm-driver-virtual", "$SRV.*.mcm-driver-virtual.*"
      ] }
      publish: { allow: [
        "mcm.v1.default.reply.virtual.>", "mcm.v1.default.session.virtual.*", "mcm.v1.default.claim.virtual.*",
        "mcm.v1.default.fetch.virtual.*"
      ] }
      allow_responses: { max: 1, expires: "5s" }
    } }
  ]
}
`

func TestLeastPermissionsSuffice(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "nats.conf")
	if err := os.WriteFile(file, []byte(driverPermissions), 0o600); err != nil {
		t.Fatal(err)
	}
	r := &optest.Rig{NATS: bustest.Server(t, embedded.Options{ConfigFile: file, StoreDir: t.TempDir()})}
	as := func(user string) string { return "nats://" + user + ":" + user + "@" + r.NATS.URL()[len("nats://"):] }
	managerLog := &optest.Violations{}
	r.Conn = bustest.Connect(t, bus.Config{URLs: []string{as("mcm")}, InboxPrefix: bus.ManagerInboxPrefix, Logger: managerLog.Logger()})
	r.Caller = optest.NewCaller(t, r.Conn, caller.Config{Operations: &caller.StreamConfig{}})
	lib := newLibrary()
	fs, err := bus.ServeFetches(r.Conn, optest.Cluster, optest.NewKey(t), lib, bustest.Quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(fs.Stop)

	log := &optest.Violations{}
	conn := bustest.Connect(t, bus.Config{URLs: []string{as("driver")}, InboxPrefix: bus.InboxPrefix(optest.Provider), Logger: log.Logger()})
	fetches, err := bus.NewFetchClient(conn, optest.Provider, nil, bustest.Quiet())
	if err != nil {
		t.Fatal(err)
	}
	// A create as the SDK does it: with its class and secret fetched on the way.
	optest.Run(t, conn, func(ctx context.Context, t *replica.Task) *driverv1.Result {
		ref := lib.secret.GetReference()
		if _, err := fetches.Class(ctx, t.Cluster, ref); err != nil {
			return &driverv1.Result{Status: bus.StatusOf(err)}
		}
		if _, err := fetches.Secret(ctx, t.Cluster, ref, ref); err != nil {
			return &driverv1.Result{Status: bus.StatusOf(err)}
		}
		t.Progress("made")

		return optest.Created(t)
	})
	bustest.Eventually(t, "the driver", func() bool {
		reps := r.Caller.Replicas()

		return len(reps) == 1
	})
	req := optest.Create("m")
	out := optest.WantOK(t, bustest.Receive(t, "the outcome", optest.Call(t.Context(), r.Caller, req)))
	if err := r.Caller.Acknowledge(optest.Provider, out.Replica, req.OperationID); err != nil {
		t.Fatal(err)
	}
	optest.WantOK(t, bustest.Receive(t, "the outcome of a second operation", optest.Call(t.Context(), r.Caller, optest.Then(req, "initialize", "1"))))
	optest.WantOK(t, bustest.Receive(t, "the outcome of a read", optest.Call(t.Context(), r.Caller, optest.Status("m"))))
	nc := bustest.Raw(t, as("root"))
	if _, err := nc.Request("$SRV.PING."+bus.ServiceName(optest.Provider), nil, nats.DefaultTimeout*5); err != nil {
		t.Errorf("discovery: %v", err)
	}
	if got := log.All(); got != "" {
		t.Errorf("the driver overstepped its permissions: %q", got)
	}
	if got := managerLog.All(); got != "" {
		t.Errorf("the manager overstepped its permissions: %q", got)
	}
	stream := bus.StreamName(optest.Cluster, optest.Provider)
	for _, subject := range []string{
		"mcm.v1.default.session.other.r", "mcm.v1.default.claim.other.u", "$JS.API.STREAM.INFO." + stream,
		"$JS.API.STREAM.PURGE." + stream, "$JS.API.STREAM.MSG.GET." + stream, "$JS.API.STREAM.DELETE." + stream,
		"$JS.API.DIRECT.GET." + stream + ".mcm.v1.default.claim.virtual.u", "$JS.API.CONSUMER.CREATE." + stream,
	} {
		refused := make(chan error, 9)
		hostile := bustest.Raw(t, as("driver"), nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { refused <- err }))
		if err := hostile.Publish(subject, []byte("x")); err != nil {
			t.Fatal(err)
		}
		if err := bustest.Receive(t, "the refusal of "+subject, refused); !errors.Is(err, nats.ErrPermissionViolation) {
			t.Errorf("publication to %s: %v, want it refused", subject, err)
		}
	}

	for _, subject := range []string{
		">", "mcm.>", "mcm.v1.default.driver.virtual.>", "mcm.v1.default.driver.other.>", "mcm.v1.default.reply.virtual.>",
		"mcm.v1.default.fetch.virtual.>", "_INBOX.>", "mcm.v1.default.session.virtual.*",
	} {
		refused := make(chan error, 9)
		wiretap := bustest.Raw(t, as("driver"), nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { refused <- err }))
		if _, err := wiretap.SubscribeSync(subject); err != nil {
			t.Fatal(err)
		}
		if err := bustest.Receive(t, "the refusal of "+subject, refused); !errors.Is(err, nats.ErrPermissionViolation) {
			t.Errorf("subscription to %s: %v, want it refused", subject, err)
		}
	}
}
