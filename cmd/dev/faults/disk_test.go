package main

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// TestWritesNothing has a process write to no file for as long as it is to, and not after
// that, whatever came of it.
func TestWritesNothing(t *testing.T) {
	t.Parallel()
	var crashes []error
	u := unitOf(t, nil, "exec sleep 60", &crashes)
	limit := func() uint64 {
		var of unix.Rlimit
		if err := unix.Prlimit(u.process.PID(), unix.RLIMIT_FSIZE, nil, &of); err != nil {
			t.Error(err)
		}
		return of.Cur
	}
	before, failed := limit(), errors.New("failed")
	for _, want := range []error{nil, failed} {
		err := u.writesNothing(func() error {
			if got := limit(); got != 0 {
				t.Errorf("it may write %d bytes to a file", got)
			}
			return want
		})
		if !errors.Is(err, want) || (err == nil) != (want == nil) {
			t.Errorf("it came to %v, want %v", err, want)
		}
		if got := limit(); got != before {
			t.Errorf("it may write %d bytes to a file afterwards, want %d", got, before)
		}
	}
	if err := u.writesNothing(func() error { return u.kill(0) }); err != nil {
		t.Errorf("a process that ended meanwhile: %v", err)
	}
	if err := u.writesNothing(nil); !errors.Is(err, errMissed) {
		t.Errorf("a process that has ended is hit: %v", err)
	}
}
