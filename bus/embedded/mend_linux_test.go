package embedded_test

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
)

// A server that could not write to its disk takes no writes when there is room again. It
// is restarted then, not before, and has all that it has acknowledged.
func TestMend(t *testing.T) { //nolint:paralleltest // in a process of its own
	mends(t, func(_ *testing.T, dir string) embedded.Options { return embedded.Options{StoreDir: dir} })
}

// The same where the configuration file says where the store is.
func TestMend_ConfigFile(t *testing.T) { //nolint:paralleltest // in a process of its own
	mends(t, func(t *testing.T, dir string) embedded.Options {
		t.Helper()

		return embedded.Options{ConfigFile: write(t, t.TempDir(), "nats.conf", fmt.Sprintf("jetstream { store_dir: %q }", dir))}
	})
}

func mends(t *testing.T, options func(*testing.T, string) embedded.Options) {
	t.Helper()
	bustest.OnSmallDisk(t, "12m", func(t *testing.T, disk bustest.Disk) {
		t.Helper()
		srv := mustStart(t, options(t, disk.Dir))
		js, err := jetstream.New(connect(t, srv.URL(), nats.MaxReconnects(-1)))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}, MaxBytes: 1 << 20}); err != nil {
			t.Fatal(err)
		}
		write := func() (uint64, error) {
			ack, err := js.Publish(t.Context(), "s", make([]byte, 1000))
			if err != nil {
				return 0, err
			}

			return ack.Sequence, nil
		}
		disk.Fill(t)
		var newest uint64
		bustest.Eventually(t, "the server fails to write", func() bool {
			sequence, err := write()
			if err == nil {
				newest = sequence
			}

			return err != nil
		})
		if err := srv.Mend(errors.New("test")); !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), disk.Dir) {
			t.Errorf("while the disk is full: %v, want that, and where", err)
		}
		disk.Free(t)
		if _, err := write(); err == nil {
			t.Error("the server takes writes again without a restart: nothing has to be mended any more")
		}
		if err := srv.Mend(errors.New("test")); err != nil {
			t.Fatal(err)
		}
		var sequence uint64
		bustest.Eventually(t, "the server takes writes", func() bool {
			sequence, err = write()

			return err == nil
		})
		if sequence <= newest {
			t.Errorf("sequence = %d after %d was acknowledged", sequence, newest)
		}
	})
}
