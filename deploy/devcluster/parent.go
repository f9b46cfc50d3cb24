package main

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// watchParent calls gone once the parent process has ended. It uses a pidfd, not PR_SET_PDEATHSIG, which fires when the
// parent's forking thread ends: Go programs end threads.
func watchParent(gone func()) error {
	ppid := os.Getppid()
	fd, err := unix.PidfdOpen(ppid, 0)
	if err != nil {
		return fmt.Errorf("watch process %d: %w", ppid, err)
	}
	if os.Getppid() != ppid { // it ended before PidfdOpen, and the pidfd may be another process's
		gone()
		return unix.Close(fd)
	}
	go func() {
		defer unix.Close(fd)
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		for {
			if _, err := unix.Poll(poll, -1); !errors.Is(err, unix.EINTR) {
				gone()
				return
			}
		}
	}()
	return nil
}
