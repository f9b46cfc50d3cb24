package embedded_test

import (
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/machinebus/machinebus/bus/embedded"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func start(t *testing.T, opts embedded.Options) (*embedded.Server, error) {
	t.Helper()
	if opts.Listen == "" {
		opts.Listen = "127.0.0.1:0"
	}
	opts.Logger = slog.New(slog.DiscardHandler)
	srv, err := embedded.Start(opts)
	if err == nil {
		t.Cleanup(srv.Stop)
	}

	return srv, err
}

func mustStart(t *testing.T, opts embedded.Options) *embedded.Server {
	t.Helper()
	srv, err := start(t, opts)
	if err != nil {
		t.Fatal(err)
	}

	return srv
}

func connect(t *testing.T, url string, opts ...nats.Option) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect(url, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)

	return nc
}

func write(t *testing.T, dir, name, text string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}

	return path
}

func TestStartRefuses(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = taken.Close() })
	dir := t.TempDir()
	file := write(t, dir, "file", "")
	issue(t, dir)
	secured := fmt.Sprintf("tls { cert_file: %q, key_file: %q }\nauthorization { user: a, password: b }\n",
		filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"))
	cases := map[string]struct {
		reason string
		opts   embedded.Options
		want   string
	}{
		"taken port":        {"the error names it", embedded.Options{Listen: taken.Addr().String()}, taken.Addr().String()},
		"all addresses":     {"beyond loopback without TLS", embedded.Options{Listen: "0.0.0.0:0"}, "--nats-allow-insecure"},
		"no host":           {"that is all addresses", embedded.Options{Listen: ":0"}, "--nats-allow-insecure"},
		"no port":           {"the error says what is wanted", embedded.Options{Listen: "127.0.0.1"}, "host:port"},
		"missing file":      {"the error names it", embedded.Options{ConfigFile: filepath.Join(dir, "none")}, "none"},
		"bad file":          {"the error names it", embedded.Options{ConfigFile: write(t, dir, "bad", "port: {")}, "bad"},
		"unknown setting":   {"the error names it", embedded.Options{ConfigFile: write(t, dir, "odd", "colour: red")}, "colour"},
		"store is a file":   {"the error names it", embedded.Options{StoreDir: file}, file},
		"store is broken":   {"the error says why, at once", embedded.Options{StoreDir: filepath.Dir(write(t, t.TempDir(), "jetstream", ""))}, "cannot run: Can't start JetStream"},
		"insecure by file":  {"the file's own address counts", embedded.Options{ConfigFile: write(t, dir, "open", `listen: "0.0.0.0:0"`)}, "0.0.0.0"},
		"plain with a user": {"credentials alone are readable", embedded.Options{Listen: "0.0.0.0:0", ConfigFile: write(t, dir, "user", "authorization { user: a, password: b }")}, "TLS"},
		"plain if they like": {
			"some would", embedded.Options{Listen: "0.0.0.0:0", ConfigFile: write(t, dir, "mixed", secured+"allow_non_tls: true")}, "without TLS",
		},
		"plain MQTT": {
			"another way to the same", embedded.Options{StoreDir: t.TempDir(), ConfigFile: write(t, dir, "mqtt", "server_name: x\n"+secured+`mqtt { listen: "0.0.0.0:-1" }`)}, "MQTT",
		},
		"anonymous websockets": {
			"TLS alone lets anybody in", embedded.Options{ConfigFile: write(t, dir, "anon", strings.Split(secured, "authorization")[0]+
				fmt.Sprintf("websocket { listen: \"0.0.0.0:-1\", tls { cert_file: %q, key_file: %q } }", filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")))}, "websockets",
		},
		"plain websockets": {
			"another way to the same", embedded.Options{ConfigFile: write(t, dir, "web", secured+`websocket { listen: "0.0.0.0:-1", no_tls: true }`)}, "websockets",
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := start(t, tc.opts)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error = %v, want one with %q: %s", err, tc.want, tc.reason)
			}
		})
	}
}

func TestConfigFileWins(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := free.Addr().String()
	if err := free.Close(); err != nil {
		t.Fatal(err)
	}
	write(t, dir, "limits.conf", "max_payload: 2048\n")
	for range 8 { // settings are read in random order
		srv := mustStart(t, embedded.Options{
			ConfigFile: write(t, dir, "main.conf", fmt.Sprintf("listen: %q\ninclude 'limits.conf'\n", addr)),
		})
		if want := "nats://" + addr; srv.URL() != want {
			t.Errorf("URL = %s, want the file's %s", srv.URL(), want)
		}
		if got := connect(t, srv.URL()).MaxPayload(); got != 2048 {
			t.Errorf("max_payload = %d, want that of a file included by the file", got)
		}
		srv.Stop()
	}
}

func TestRestart(t *testing.T) {
	t.Parallel()
	srv := mustStart(t, embedded.Options{StoreDir: t.TempDir()})
	url := srv.URL()
	up := make(chan struct{}, 9)
	again := []nats.Option{
		nats.ReconnectWait(10 * time.Millisecond), nats.MaxReconnects(-1),
		nats.ReconnectHandler(func(*nats.Conn) { up <- struct{}{} }),
	}
	inProcess := connect(t, "", append(again, nats.InProcessServer(srv))...)
	tcp := connect(t, url, again...)
	js, err := jetstream.New(tcp)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(t.Context(), "s", []byte("kept")); err != nil {
		t.Fatal(err)
	}

	srv.Stop()
	srv.Stop() // twice is once
	if _, err := srv.InProcessConn(); err == nil {
		t.Error("a stopped server gave a connection")
	}
	if err := srv.Restart(); err != nil {
		t.Fatal(err)
	}
	if srv.URL() != url {
		t.Errorf("URL = %s after a restart, want %s", srv.URL(), url)
	}
	limit := time.NewTimer(30 * time.Second)
	defer limit.Stop()
	for range 2 {
		select {
		case <-up:
		case <-limit.C:
			t.Fatal("a client did not come back")
		}
	}
	// Ready means that the store is open: no retry here.
	stream, err := js.Stream(t.Context(), "S")
	if err != nil {
		t.Fatal(err)
	}
	if m, err := stream.GetLastMsgForSubject(t.Context(), "s"); err != nil || string(m.Data) != "kept" {
		t.Errorf("message = %v, %v; want what was stored before the restart", m, err)
	}
	if err := inProcess.FlushTimeout(10 * time.Second); err != nil {
		t.Errorf("in-process connection after a restart: %v", err)
	}
}
