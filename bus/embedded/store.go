package embedded

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

const (
	// mendRoom is how much a disk has to take before a server is restarted for it.
	mendRoom = 1 << 20
	// mendAgain is the least time between two restarts: one whose disk is merely slow is
	// not to be kept from its work.
	mendAgain    = 30 * time.Second
	restartAgain = 5 * time.Second
)

// A store is where the server's JetStream keeps its streams.
type store struct {
	settings  string // of the server, in its configuration's syntax
	temporary string // directory that goes with the server; empty for none
	dir       string // where the server that runs keeps its streams; empty without JetStream
}

// openStore makes the directory that JetStream needs even if it keeps all streams in
// memory. Its settings forbid streams there that would outlive the server.
func (s *Server) openStore() (store, error) {
	theirs, err := s.configured()
	switch {
	case err != nil:
		return store{}, err
	case theirs["jetstream"]:
		return store{}, nil
	case theirs["store_dir"], theirs["storedir"]:
		return store{settings: "jetstream: enabled"}, nil
	case s.opts.StoreDir != "":
		if err := os.MkdirAll(s.opts.StoreDir, 0o700); err != nil {
			return store{}, fmt.Errorf("NATS store directory: %w", err)
		}

		return store{settings: fmt.Sprintf("jetstream { store_dir: %q }", s.opts.StoreDir)}, nil
	default:
		dir, err := os.MkdirTemp("", "machinebus-nats-")
		if err != nil {
			return store{}, fmt.Errorf("temporary directory of the in-memory NATS server (set TMPDIR, or give --nats-store-dir): %w", err)
		}

		return store{settings: fmt.Sprintf("jetstream { store_dir: %q, max_file_store: 0 }", dir), temporary: dir}, nil
	}
}

// close removes what must not stay.
func (s store) close() error {
	if s.temporary == "" {
		return nil
	}
	if err := os.RemoveAll(s.temporary); err != nil {
		return fmt.Errorf("remove the temporary directory of the in-memory NATS server: %w", err)
	}

	return nil
}

// InMemory reports whether the server keeps all streams in memory, and refuses others.
func (s *Server) InMemory() bool {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.store.temporary != ""
}

// Mend restarts the server in place if its store can be written to: after a write that
// failed, as on a full disk, JetStream takes none until then. Clients connect again by
// themselves. It is for a server that does not take writes, for the cause that is logged
// along; the error says why that cannot be helped yet. A server that keeps its streams in
// memory, or was restarted within the last 30 s, is left alone. Calls at the same time
// follow each other; one returns when the server runs again or Quit is closed.
func (s *Server) Mend(cause error) error {
	s.mending.Lock()
	defer s.mending.Unlock()
	s.mu.Lock()
	srv, dir, inMemory, last := s.srv, s.store.dir, s.store.temporary != "", s.mended
	s.mu.Unlock()
	if srv == nil || inMemory || time.Since(last) < mendAgain {
		return nil
	}
	if err := takesWrites(dir); err != nil {
		return fmt.Errorf("NATS store directory: no room for another %d bytes: %w", mendRoom, err)
	}
	s.mu.Lock()
	s.mended = time.Now()
	s.mu.Unlock()
	s.opts.Logger.Warn("restarting the embedded nats-server: it takes no writes, and its store has room", "cause", cause)
	s.stop()
	for {
		err := s.Restart()
		if err == nil {
			s.opts.Logger.Info("the embedded nats-server runs again")

			return nil
		}
		s.opts.Logger.Error("the embedded nats-server does not start again; retries after "+restartAgain.String(), "err", err)
		select {
		case <-time.After(restartAgain):
		case <-s.opts.Quit:
			return fmt.Errorf("restart the embedded nats-server: %w", err)
		}
	}
}

// takesWrites finds out whether a directory's disk takes as much as a server needs to
// start on.
func takesWrites(dir string) (err error) {
	f, err := os.Create(filepath.Join(dir, "room"))
	if err != nil {
		return err //nolint:wrapcheck // by its caller
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(f.Name())) }()
	if _, err := f.Write(make([]byte, mendRoom)); err != nil {
		return err //nolint:wrapcheck // by its caller
	}

	return f.Sync() //nolint:wrapcheck // by its caller
}
