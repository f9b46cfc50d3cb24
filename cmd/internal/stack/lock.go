package stack

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
)

// A LockedError says that another process holds a lock.
type LockedError struct {
	// Holder is its process id, as it wrote it down.
	Holder string
}

func (e *LockedError) Error() string { return "held by process " + e.Holder }

// Lock makes this process the only one that works with something, by locking a
// file. The kernel releases the lock when the process ends, however that happens.
// The error is a [*LockedError] when another process has it.
func Lock(path string) (release func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open a lock file: %w", err)
	}
	if err := take(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil // nothing can be lost: what is in the file is for people
}

func take(f *os.File) error {
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
