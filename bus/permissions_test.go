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
	"github.com/machinebus/machinebus/bus/embedded"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// driverPermissions are the least a driver of provider virtual needs for
// control plane default.
const driverPermissions = `
authorization {
  users = [
    { user: mcm, password: mcm }
    { user: driver, password: driver, permissions: {
      subscribe: { allow: [
        "mcm.v1.default.driver.virtual.> driver", "mcm.v1.default.replica.virtual.>", "mcm.v1.default.hello",
        "mcm.v1.default.changed.virtual", "_INBOX_driver.virtual.>",
        "$SRV.PING", "$SRV.INFO", "$SRV.STATS",
        "$SRV.*.mcm-driver-virtual", "$SRV.*.mcm-driver-virtual.*"
      ] }
      publish: { allow: [
        "mcm.v1.default.reply.virtual.>", "mcm.v1.default.session.virtual.>", "mcm.v1.default.fetch.virtual.>"
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
	r := &rig{srv: bustest.Server(t, embedded.Options{ConfigFile: file})}
	as := func(user string) string { return "nats://" + user + ":" + user + "@" + r.srv.URL()[len("nats://"):] }
	r.conn = bustest.Connect(t, bus.Config{URLs: []string{as("mcm")}})
	r.caller = newCaller(t, r.conn, bus.CallerConfig{})
	lib := newLibrary()
	fs, err := bus.ServeFetches(r.conn, cluster, newKey(t), lib, bustest.Quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(fs.Stop)

	log := &violations{}
	conn := bustest.Connect(t, bus.Config{URLs: []string{as("driver")}, InboxPrefix: bus.InboxPrefix(provider), Logger: log.logger()})
	fetches, err := bus.NewFetchClient(conn, provider, nil, bustest.Quiet())
	if err != nil {
		t.Fatal(err)
	}
	// A create as the SDK does it: with its class and secret fetched on the way.
	run(t, conn, func(ctx context.Context, t *bus.Task) *driverv1.Result {
		ref := lib.secret.GetReference()
		if _, err := fetches.Class(ctx, t.Cluster, ref); err != nil {
			return &driverv1.Result{Status: bus.StatusOf(err)}
		}
		if _, err := fetches.Secret(ctx, t.Cluster, ref, ref); err != nil {
			return &driverv1.Result{Status: bus.StatusOf(err)}
		}
		t.Progress("made")

		return created(t)
	})
	bustest.Eventually(t, "the driver's session", func() bool { return len(r.caller.Replicas()) == 1 })
	req := create("m")
	out := wantOK(t, bustest.Receive(t, "the outcome", call(t.Context(), r.caller, req)))
	if err := r.caller.Acknowledge(provider, out.Replica, req.OperationID); err != nil {
		t.Fatal(err)
	}
	wantOK(t, bustest.Receive(t, "the outcome of a read", call(t.Context(), r.caller, status("m"))))
	nc := bustest.Raw(t, as("mcm"))
	if _, err := nc.Request("$SRV.PING."+bus.ServiceName(provider), nil, nats.DefaultTimeout*5); err != nil {
		t.Errorf("discovery: %v", err)
	}
	if got := log.all(); got != "" {
		t.Errorf("the driver overstepped its permissions: %q", got)
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
