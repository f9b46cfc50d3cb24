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

// stopLimit is how long the driver may take to exit after SIGTERM.
const stopLimit = time.Minute

// A driver runs the process of the checked driver, one at a time.
type driver struct {
	command []string
	env     []string
	output  io.Writer

	mu    sync.Mutex
	cmd   *exec.Cmd
	asked bool          // to exit
	done  chan struct{} // closed when cmd has ended
	lost  context.CancelCauseFunc
}

// newDriver returns a driver that is not started. Its environment is this program's
// and more.
func newDriver(command, more []string, output io.Writer) *driver {
	return &driver{command: command, env: append(os.Environ(), more...), output: output, lost: func(error) {}}
}

// watch returns a context that ends when the driver exits unasked. It must be called
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
	// Its own process group, so that Ctrl-C reaches only this program.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second // a child of the driver may keep its output open
	started, done := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(done)
		// Pdeathsig is sent when the thread that started the child ends.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // ProcessState has the result, too
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
		d.lost(d.endedLocked())
	}
}

func (d *driver) endedLocked() error {
	return fmt.Errorf("the driver %s exited without being stopped: %s", d.command[0], d.cmd.ProcessState)
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

// Wait waits until the driver has exited. It returns an error if that takes too long.
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
		return fmt.Errorf("the driver did not exit within %s of SIGTERM", stopLimit)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Start starts the driver again after killing it if it still runs.
func (d *driver) Start(context.Context) error {
	d.kill()

	return d.start()
}

// kill kills the driver and waits until it has exited.
func (d *driver) kill() {
	if d.signal(syscall.SIGKILL) == nil {
		<-d.done
	}
}
