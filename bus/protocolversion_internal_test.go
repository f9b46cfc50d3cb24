package bus

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// recorded is a message as a peer of an earlier build has sent it. These files are
// never written afresh.
func recorded(t *testing.T, name string) *nats.Msg {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "peers", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	var file goldenFile
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	payload, err := hex.DecodeString(file.Protobuf)
	if err != nil {
		t.Fatal(err)
	}

	return &nats.Msg{Subject: file.Subject, Data: payload}
}

// A build that speaks later versions works with a recorded peer as long as they share
// one, and refuses it with a text that says which side to upgrade when they do not.
func TestProtocol_RecordedPeer(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		ours            protocols
		session, remedy string // in what refuses; empty for not refused
	}{
		"same":        {ours: protocols{1, 1}},
		"overlapping": {ours: protocols{1, 3}},
		"later": {
			ours:    protocols{2, 3},
			session: "speaks protocol version 1, and mcm speaks 2 to 3: upgrade the driver",
			remedy:  "speaks protocol version 1, and this driver speaks 2 to 3: upgrade mcm",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			env, err := decodeMsg(recorded(t, "v1/session"))
			if err != nil {
				t.Fatal(err)
			}
			s := env.GetSession()
			r := newReplicas()
			r.protocols = tc.ours
			r.onSession(s, time.Now())
			wantRefusal(t, "session", r.refusal(s.GetProvider()), tc.session)
			picked := r.pick(s.GetProvider(), opCreate, time.Now(), nil)
			if refused := tc.session != ""; refused == (picked != "") {
				t.Errorf("replica %q gets a create; refused: %t", picked, refused)
			}

			var log bytes.Buffer
			server := strangeServer(t, &log, tc.ours)
			for range 2 {
				server.onHello(recorded(t, "v1/hello"))
			}
			wantRefusal(t, "hello", server.Refusal(), tc.remedy)
			want := 0
			if tc.remedy != "" {
				want = 1
			}
			if n := strings.Count(log.String(), "level=ERROR"); n != want {
				t.Errorf("%d lines logged at ERROR, want %d:\n%s", n, want, log.String())
			}
		})
	}
}

// strangeServer is a replica that speaks these versions and is on no bus.
func strangeServer(t *testing.T, log *bytes.Buffer, ours protocols) *Server {
	t.Helper()
	server, err := newServer(nil, ServerConfig{
		Provider: "p", Capabilities: []driverv1.Operation{opCreate}, Logger: slog.New(slog.NewTextHandler(log, nil)),
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
	server := strangeServer(t, &log, protocols{1, 1})
	hello := func(epoch uint64, version uint32) {
		payload, err := Encode(&driverv1.Envelope{Body: &driverv1.Envelope_Hello{Hello: &driverv1.Hello{
			Cluster: "default", Epoch: epoch, ProtocolMin: version, ProtocolMax: version,
		}}}, "")
		if err != nil {
			t.Fatal(err)
		}
		server.onHello(&nats.Msg{Subject: wildcard("default", TreeHello), Data: payload})
	}
	hello(2, 1)
	hello(1, 5)
	wantRefusal(t, "the hello of the manager that leads", server.Refusal(), "")
	hello(3, 5)
	hello(2, 1)
	wantRefusal(t, "the hello of the manager that leads", server.Refusal(), "speaks protocol version 5, and this driver speaks 1: upgrade this driver")
}
