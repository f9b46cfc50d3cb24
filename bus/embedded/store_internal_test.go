package embedded

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/conf"
)

// A power cut must not take what a server has acknowledged: claims are among that. People
// who set it otherwise have it so.
func TestSync(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		config string // with the place of a directory; empty for no file
		always bool
	}{
		"directory":        {"the flag gives it", "", true},
		"directory alone":  {"the file gives it", "store_dir: %q", true},
		"JetStream":        {"the file has its own block", "jetstream { store_dir: %q }", true},
		"JetStream, aloud": {"names have no case", "JetStream { store_dir: %q }", true},
		"on":               {"the file says that alone", "jetstream: enabled\nstore_dir: %q", true},
		"now and then":     {"the file says how often", "jetstream { store_dir: %q, sync_interval: 30s }", false},
		"shorter":          {"another name of the same", "jetstream { store_dir: %q, Sync: 30s }", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			opts := Options{Listen: "127.0.0.1:0", Logger: slog.New(slog.DiscardHandler), StoreDir: t.TempDir()}
			if tc.config != "" {
				opts.ConfigFile, opts.StoreDir = filepath.Join(t.TempDir(), "nats.conf"), ""
				if err := os.WriteFile(opts.ConfigFile, fmt.Appendf(nil, tc.config, t.TempDir()), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			srv, err := Start(opts)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(srv.Stop)
			config := srv.srv.JetStreamConfig()
			if config == nil || config.SyncAlways != tc.always {
				t.Errorf("JetStream is %+v, want that it syncs each write: %t, as %s", config, tc.always, tc.reason)
			}
		})
	}
}

// A server that has switched JetStream off still says where its store is: it is that
// disk that has to take writes before it is restarted.
func TestMend_SwitchedOff(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "store")
	opts := Options{
		Listen: "127.0.0.1:0", Logger: slog.New(slog.DiscardHandler), ConfigFile: filepath.Join(t.TempDir(), "nats.conf"),
	}
	if err := os.WriteFile(opts.ConfigFile, fmt.Appendf(nil, "jetstream { store_dir: %q }", dir), 0o600); err != nil {
		t.Fatal(err)
	}
	srv, err := Start(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Stop)
	if err := srv.srv.DisableJetStream(); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := srv.Mend(errors.New("test")); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), dir) {
		t.Errorf("without its directory: %v, want that, and which", err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "jetstream"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := srv.Mend(errors.New("test")); err != nil || !srv.srv.JetStreamEnabled() {
		t.Errorf("with its directory: %v, JetStream is on: %t", err, srv.srv.JetStreamEnabled())
	}
}

// The example of a NATS of one's own does the same.
func TestSync_Example(t *testing.T) { //nolint:paralleltest // sets an environment variable
	t.Setenv("SERVER_NAME", "nats-0")
	settings, err := conf.ParseFile("../../deploy/nats/nats-server.conf")
	if err != nil {
		t.Fatal(err)
	}
	if jetstream, ok := settings["jetstream"].(map[string]any); !ok || jetstream["sync_interval"] != "always" {
		t.Errorf("JetStream is %v, want that it syncs each write", settings["jetstream"])
	}
}
