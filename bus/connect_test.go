package bus_test

import (
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/optest"
)

func TestConnectRefuses(t *testing.T) {
	t.Parallel()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := free.Addr().String()
	if err := free.Close(); err != nil {
		t.Fatal(err)
	}
	missing := filepath.Join(t.TempDir(), "missing")
	cases := map[string]struct {
		reason string
		cfg    bus.Config
		want   string
	}{
		"nobody there":       {"the error names the server and the remedy", bus.Config{URLs: []string{"nats://u:hidden@" + addr}, FailFast: true}, "is the server running"},
		"plain beyond":       {"payloads would be readable", bus.Config{URLs: []string{"nats://nats.example:4222"}}, "without TLS"},
		"anonymous beyond":   {"anybody could take its place", bus.Config{URLs: []string{"tls://nats.example:4222"}}, "without credentials"},
		"one of several":     {"each counts", bus.Config{URLs: []string{"nats://127.0.0.1:4222,nats://nats.example:4222"}}, "nats.example"},
		"beyond by address":  {"only loopback is this host alone", bus.Config{URLs: []string{"nats://10.0.0.1:4222"}}, "10.0.0.1"},
		"no URL":             {"the error shows what one looks like", bus.Config{URLs: []string{"nats://"}}, "nats://host:4222"},
		"missing creds":      {"the error names the file", bus.Config{URLs: []string{"nats://" + addr}, Creds: missing}, missing},
		"missing CA":         {"the error names the file", bus.Config{URLs: []string{"nats://" + addr}, CA: missing}, missing},
		"half a certificate": {"the error says what is missing", bus.Config{URLs: []string{"nats://" + addr}, Cert: missing}, "both"},
	}
	for name, secret := range map[string]string{
		"a password that is no URL":     "nats://u:hidden#x@10.0.0.1:4222",
		"one with a percent sign":       "nats://u:hidden%zz@10.0.0.1:4222",
		"one with a comma":              "nats://u:hidden,x@10.0.0.1:4222",
		"a token with a comma":          "nats://hidden,x@10.0.0.1:4222",
		"digits before a comma":         "nats://u:hidden1,2@10.0.0.1:4222",
		"one without a scheme":          "u:hidden@10.0.0.1:4222",
		"a token":                       "nats://hidden@10.0.0.1:4222",
		"a token without a scheme":      "hidden@10.0.0.1:4222",
		"a password in several":         "nats://127.0.0.1:1,nats://u:hidden@10.0.0.1:4222",
		"a password before a bad port":  "nats://u:hidden@10.0.0.1:port",
		"a password with a bad address": "nats://u:hidden@[10.0.0.1:4222",
	} {
		c := cases["plain beyond"]
		c.cfg.URLs, c.want = []string{secret}, "NATS URL"
		cases[name] = c
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tc.cfg.Logger = bustest.Quiet()
			conn, err := bus.Connect(t.Context(), tc.cfg)
			if err == nil {
				conn.Close()
				t.Fatalf("no error: %s", tc.reason)
			}
			if !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "hidden") {
				t.Errorf("error = %q, want one with %q and without a password: %s", err, tc.want, tc.reason)
			}
		})
	}
}

// Being told to be careless with the network is no reason to be so with logs.
func TestConnectHidesWhatIsSecret(t *testing.T) {
	t.Parallel()
	for name, url := range map[string]string{
		"no URL":     "nats://u:hidden#x@127.0.0.1:1",
		"no scheme":  "u:hidden@127.0.0.1:1",
		"token":      "nats://hidden@127.0.0.1:1",
		"percentage": "nats://u:hidden%zz@127.0.0.1:1",
	} {
		_, err := bus.Connect(t.Context(), bus.Config{URLs: []string{url}, AllowInsecure: true, FailFast: true, Logger: bustest.Quiet()})
		if err == nil || strings.Contains(err.Error(), "hidden") {
			t.Errorf("%s: error = %v", name, err)
		}
	}

	dir := t.TempDir()
	config := filepath.Join(dir, "nats.conf")
	if err := os.WriteFile(config, []byte("authorization { token: hidden }"), 0o600); err != nil {
		t.Fatal(err)
	}
	srv := bustest.Server(t, embedded.Options{ConfigFile: config})
	var log optest.Violations
	conn, err := bus.Connect(t.Context(), bus.Config{
		URLs: []string{strings.Replace(srv.URL(), "nats://", "hidden@", 1)}, FailFast: true,
		Logger: slog.New(slog.NewTextHandler(&log, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	bustest.Eventually(t, "the log has the server", func() bool { return strings.Contains(log.All(), "***@127.0.0.1") })
	url := conn.URL()
	conn.Close()
	if text := log.All(); strings.Contains(text+url, "hidden") || !strings.Contains(text, "***@127.0.0.1") {
		t.Errorf("the URL is %s, and the log is\n%s", url, text)
	}
}

func TestConnectAllowsInsecureWhenTold(t *testing.T) {
	t.Parallel()
	srv := bustest.Server(t, embedded.Options{Listen: "0.0.0.0:0", AllowInsecure: true})
	for name, cfg := range map[string]bus.Config{
		"told":       {URLs: []string{srv.URL()}, AllowInsecure: true},
		"in process": {InProcess: srv},
	} {
		conn := bustest.Connect(t, cfg)
		if !conn.Up() {
			t.Errorf("%s: not connected", name)
		}
		if want := srv.URL(); name == "told" && conn.URL() != want {
			t.Errorf("%s: URL = %q, want %q", name, conn.URL(), want)
		}
		if name == "in process" && conn.URL() != "in process" {
			t.Errorf("%s: URL = %q, but no address was connected to", name, conn.URL())
		}
	}
}

func TestConnectWithoutServerWaits(t *testing.T) {
	t.Parallel()
	srv := bustest.Server(t, embedded.Options{})
	url := srv.URL()
	srv.Stop()
	conn, err := bus.Connect(t.Context(), bus.Config{URLs: []string{url}, Logger: bustest.Quiet()})
	if err != nil {
		t.Fatalf("Connect without a server: %v, want a connection that comes up later", err)
	}
	t.Cleanup(conn.Close)
	up := make(chan struct{}, 9)
	conn.OnUp(func() { up <- struct{}{} })
	if conn.Up() {
		t.Error("up without a server")
	}
	if err := srv.Restart(); err != nil {
		t.Fatal(err)
	}
	bustest.Receive(t, "the first connection", up)
	late := make(chan struct{}, 9)
	conn.OnUp(func() { late <- struct{}{} })
	bustest.Receive(t, "a hook that comes late is called at once", late)
}

// TestNothingOldIsSentAfterAnOutage: a request published into an outage must
// fail at once, not run later.
func TestNothingOldIsSentAfterAnOutage(t *testing.T) {
	t.Parallel()
	r := optest.NewRig(t)
	seen := make(chan string, 99)
	listen := func() {
		nc := bustest.Raw(t, r.NATS.URL())
		if _, err := nc.Subscribe("mcm.v1.*.audit.>", func(m *nats.Msg) { seen <- m.Subject }); err != nil || nc.Flush() != nil {
			t.Fatal(err)
		}
	}
	announcer, err := bus.NewAnnouncer(r.Conn, optest.Cluster)
	if err != nil {
		t.Fatal(err)
	}
	r.NATS.Stop()
	bustest.Eventually(t, "the outage is noticed", func() bool { return !r.Conn.Up() })
	if err := announcer.Audit(optest.Audit("old")); err == nil {
		t.Error("publishing into an outage gave no error")
	}
	if err := r.NATS.Restart(); err != nil {
		t.Fatal(err)
	}
	listen()
	bustest.Eventually(t, "the connection is back", r.Conn.Up)
	if err := announcer.Audit(optest.Audit("new")); err != nil {
		t.Fatal(err)
	}
	if got := bustest.Receive(t, "the new message", seen); !strings.HasSuffix(got, ".new") {
		t.Errorf("first message after the outage is %s, want the new one", got)
	}
}
