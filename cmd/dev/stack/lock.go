package stack

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
)

// A LockedError means that another process holds a lock.
type LockedError struct {
	// Holder is its process id, read from the file.
	Holder string
}

func (e *LockedError) Error() string { return "held by process " + e.Holder }

// Lock locks a file exclusively. The kernel releases the lock when the process ends. The
// error is a [*LockedError] if another process has the lock.
func Lock(path string) (release func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open a lock file: %w", err)
	}
	if err := lockFile(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() {
		// A child that is about to be started has a copy of the descriptor until its exec:
		// closing ours alone would leave the lock with it (flock(2)).
		_ = syscall.Flock(int(f.Fd()), syscall.LOCK_UN)
		_ = f.Close() // the file's content is only for people
	}, nil
}

func lockFile(f *os.File) error {
	err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		holder, err := os.ReadFile(f.Name())
		if err != nil {
			return fmt.Errorf("lock %s: %w", f.Name(), err)
		}
		return &LockedError{Holder: strings.TrimSpace(string(holder))}
	}
	if err != nil {
		return fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err = fmt.Fprintln(f, os.Getpid())
	return err
}
