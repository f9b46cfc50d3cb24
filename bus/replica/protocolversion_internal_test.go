package replica

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/golden"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A build that speaks later versions works with a recorded manager as long as they share
// one, and refuses it with a text that says which side to upgrade when they do not.
func TestProtocol_RecordedManager(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		ours   bus.Protocols
		refuse string // how the refusal ends; empty for none
	}{
		"same":        {ours: bus.Protocols{Lowest: 1, Highest: 1}},
		"overlapping": {ours: bus.Protocols{Lowest: 1, Highest: 3}},
		"later":       {ours: bus.Protocols{Lowest: 2, Highest: 3}, refuse: "speaks protocol version 1, and this driver speaks 2 to 3: upgrade mcm"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var log bytes.Buffer
			server := strangeServer(t, &log, tc.ours)
			for range 2 {
				server.onHello("default", golden.Message(t, "../testdata/peers/v1/hello.json"))
			}
			wantRefusal(t, "hello", server.Refusal(), tc.refuse)
			want := 0
			if tc.refuse != "" {
				want = 1
			}
			if n := strings.Count(log.String(), "level=ERROR"); n != want {
				t.Errorf("%d lines logged at ERROR, want %d:\n%s", n, want, log.String())
			}
		})
	}
}

// strangeServer is a replica that speaks these versions and is on no bus.
func strangeServer(t *testing.T, log *bytes.Buffer, ours bus.Protocols) *Server {
	t.Helper()
	server, err := New(nil, Config{
		Provider: "p", Capabilities: []driverv1.Operation{driverv1.Operation_OPERATION_CREATE}, Logger: slog.New(slog.NewTextHandler(log, nil)),
	}, HandlerFunc(func(context.Context, *Task) *driverv1.Result { return nil }))
	if err != nil {
		t.Fatal(err)
	}
	server.managers.protocols = ours

	return server
}

func wantRefusal(t *testing.T, what string, got error, want string) {
	t.Helper()
	if want == "" && got != nil || want != "" && (got == nil || !strings.HasSuffix(got.Error(), want)) {
		t.Errorf("%s is refused with %v, want %q", what, got, want)
	}
}

// A manager that was replaced does not say which versions are spoken.
func TestProtocol_ReplacedManager(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	server := strangeServer(t, &log, bus.Protocols{Lowest: 1, Highest: 1})
	hello := func(epoch uint64, version uint32) {
		payload, err := bus.Encode(&driverv1.Envelope{Body: &driverv1.Envelope_Hello{Hello: &driverv1.Hello{
			Cluster: "default", Epoch: epoch, ProtocolMin: version, ProtocolMax: version,
		}}}, "")
		if err != nil {
			t.Fatal(err)
		}
		server.onHello("default", &nats.Msg{Data: payload})
	}
	hello(2, 1)
	hello(1, 5)
	wantRefusal(t, "the hello of the manager that leads", server.Refusal(), "")
	hello(3, 5)
	hello(2, 1)
	wantRefusal(t, "the hello of the manager that leads", server.Refusal(), "speaks protocol version 5, and this driver speaks 1: upgrade this driver")
}
