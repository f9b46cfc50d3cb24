package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// stopLimit is how long the driver may take to end after SIGTERM.
const stopLimit = time.Minute

// A driver is the process of the driver that is checked, one after the other.
type driver struct {
	command []string
	env     []string
	output  io.Writer

	mu    sync.Mutex
	cmd   *exec.Cmd
	asked bool          // to end
	done  chan struct{} // closed when cmd has ended
	lost  context.CancelCauseFunc
}

// newDriver makes a driver that is not started yet and has more in its environment
// than this program.
func newDriver(command, more []string, output io.Writer) *driver {
	return &driver{command: command, env: append(os.Environ(), more...), output: output, lost: func(error) {}}
}

// watch returns a context that ends when the driver ends unasked. It is called
// before start.
func (d *driver) watch(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, d.lost = context.WithCancelCause(ctx)

	return ctx, func() { d.lost(nil) }
}

func (d *driver) start() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	cmd := exec.Command(d.command[0], d.command[1:]...)
	cmd.Env, cmd.Stdout, cmd.Stderr = d.env, d.output, d.output
	// Of its own process group, so that Ctrl-C reaches us alone.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second // a child of the driver may keep its output open
	started, done := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(done)
		// A child gets its parent-death signal when the thread ends that started it.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // ProcessState says it as well
			d.onEnd(cmd)
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("start the driver: %w", err)
	}
	d.cmd, d.done, d.asked = cmd, done, false

	return nil
}

func (d *driver) onEnd(cmd *exec.Cmd) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cmd == cmd && !d.asked {
		d.lost(d.ended())
	}
}

func (d *driver) ended() error {
	return fmt.Errorf("the driver %s ended by itself: %s", d.command[0], d.cmd.ProcessState)
}

// Stop sends SIGTERM.
func (d *driver) Stop(context.Context) error { return d.signal(syscall.SIGTERM) }

func (d *driver) signal(s syscall.Signal) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asked = true
	if err := d.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("send %s to the driver: %w", s, err)
	}

	return nil
}

// Wait returns when the driver has ended; it is an error when that takes too long.
func (d *driver) Wait(ctx context.Context) error {
	d.mu.Lock()
	done := d.done
	d.mu.Unlock()
	limit := time.NewTimer(stopLimit)
	defer limit.Stop()
	select {
	case <-done:
		return nil
	case <-limit.C:
		return fmt.Errorf("the driver did not end within %s of SIGTERM", stopLimit)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Start starts the driver again, ending it first if it still runs.
func (d *driver) Start(context.Context) error {
	d.kill()

	return d.start()
}

// kill ends the driver at once.
func (d *driver) kill() {
	if d.signal(syscall.SIGKILL) == nil {
		<-d.done
	}
}
