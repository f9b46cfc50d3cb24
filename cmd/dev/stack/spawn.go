package stack

import (
	"os/exec"
	"runtime"
	"sync"
)

// spawner starts commands on one thread that never ends. The kernel sends a child its
// parent-death signal when the thread that forked it ends, not the process (prctl(2),
// PR_SET_PDEATHSIG), and the Go runtime may end threads at any time. So a child started
// from any other goroutine could be killed at any time.
var spawner = sync.OnceValue(func() chan<- spawn {
	requests := make(chan spawn)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread lives as long as the process
		for s := range requests {
			s.err <- s.cmd.Start()
		}
	}()
	return requests
})

type spawn struct {
	cmd *exec.Cmd
	err chan<- error
}

// startOnLastingThread is cmd.Start for a command with a parent-death signal.
func startOnLastingThread(cmd *exec.Cmd) error {
	err := make(chan error, 1)
	spawner() <- spawn{cmd: cmd, err: err}
	return <-err
}
