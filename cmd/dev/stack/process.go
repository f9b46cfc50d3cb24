package stack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// pollEvery is the interval of Poll.
	pollEvery = 25 * time.Millisecond
	// stopLimit is how long a process may take to exit after SIGTERM.
	stopLimit = 15 * time.Second
	// startLimit is how long a process may take to become ready.
	startLimit = time.Minute
	// shownLines is how much of a log an error quotes.
	shownLines = 15
)

// A Process is one running program. Its methods are safe for concurrent use.
type Process struct {
	// Name is unique within the Site.
	Name string
	// Log is the file of standard error, Output that of standard output.
	Log, Output string

	command command
	cmd     *exec.Cmd
	asked   atomic.Bool // to exit, by Stop or Kill
	ready   atomic.Bool
	done    chan struct{}
	err     error // of Wait; valid once done is closed
}

// command is a program with its arguments and environment.
type command struct {
	name    string
	program string
	args    []string
	env     []string // besides PATH and HOME
	again   int      // how often it was run before
}

// logName returns the base name of its files: each run has its own.
func (c command) logName() string {
	if c.again == 0 {
		return c.name
	}
	return fmt.Sprintf("%s-%d", c.name, c.again+1)
}

// start runs a command with its output in dir. A detached process is the leader of its
// own session and outlives this one; any other dies with this one.
func start(dir string, c command, program string, detached bool) (*Process, error) {
	p := &Process{
		Name: c.name, Log: filepath.Join(dir, c.logName()+".log"), Output: filepath.Join(dir, c.logName()+".out"),
		command: c, done: make(chan struct{}),
	}
	// Files, not pipes: the process can always write.
	stdout, err := os.Create(p.Output)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", c.name, err)
	}
	defer stdout.Close()
	stderr, err := os.Create(p.Log)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", c.name, err)
	}
	defer stderr.Close()

	p.cmd = exec.Command(program, c.args...)
	p.cmd.Stdout, p.cmd.Stderr = stdout, stderr
	// KUBECONFIG, NATS_URL and the like must not reach the programs.
	p.cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME")}, c.env...)
	// Ctrl-C in a terminal reaches only this program, which stops the others in order.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if detached {
		p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	}
	if err := startOnLastingThread(p.cmd); err != nil {
		return nil, fmt.Errorf("start %s: %w", c.name, err)
	}
	go func() {
		defer close(p.done)
		p.err = p.cmd.Wait()
	}()
	return p, nil
}

// PID returns the process id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done returns a channel that is closed when the process has exited.
func (p *Process) Done() <-chan struct{} { return p.done }

// Kill ends the process as a crash would (SIGKILL), and returns when it is gone.
func (p *Process) Kill() error {
	p.asked.Store(true)
	if err := p.signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-p.done
	return nil
}

// Failure returns an error if the process has exited unexpectedly, as in Stop; nil while
// it runs.
func (p *Process) Failure() error {
	select {
	case <-p.done:
		return p.unexpected()
	default:
		return nil
	}
}

// ExpectEnd allows the process to exit by itself with code 0.
func (p *Process) ExpectEnd() { p.asked.Store(true) }

// Pause suspends the process (SIGSTOP) until Resume.
func (p *Process) Pause() error { return p.signal(syscall.SIGSTOP) }

// Resume resumes a paused process (SIGCONT).
func (p *Process) Resume() error { return p.signal(syscall.SIGCONT) }

// Stop sends SIGTERM, and kills the process if it has not exited by the limit, which is
// an error. An exit code other than 0 after it was ready, and an exit before Stop, are
// errors, too. A process killed by Kill is not.
func (p *Process) Stop() error {
	select {
	case <-p.done:
		return p.unexpected()
	default:
	}
	p.asked.Store(true)
	if err := p.signal(syscall.SIGTERM); err != nil {
		return err
	}
	if err := p.Resume(); err != nil { // a paused process would never get the signal
		return err
	}
	select {
	case <-p.done:
		return p.unexpected()
	case <-time.After(stopLimit):
	}
	if err := p.Kill(); err != nil {
		return err
	}
	return fmt.Errorf("%s did not exit within %s of SIGTERM and was killed; its log: %s", p.Name, stopLimit, p.Log)
}

// unexpected returns an error if the ended process exited unexpectedly.
func (p *Process) unexpected() error {
	status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	// SIGTERM ends a program that has not set up its signal handler yet.
	byUs := ok && status.Signaled() && (status.Signal() == syscall.SIGKILL || status.Signal() == syscall.SIGTERM)
	// A program that is stopped during its start may exit with an error.
	if p.asked.Load() && (p.err == nil || byUs || !p.ready.Load()) {
		return nil
	}
	return p.ended()
}

// ended returns the error of an ended process, with the last lines of its log.
func (p *Process) ended() error {
	how := "exited without being stopped"
	if p.err != nil {
		how = "exited: " + p.err.Error()
	}
	return fmt.Errorf("%s %s\n%s", p.Name, how, p.lastLines())
}

func (p *Process) lastLines() string {
	text := tail(p.Log)
	if text == "" {
		text = tail(p.Output)
	}
	if text == "" {
		return "its log " + p.Log + " is empty"
	}
	return "last lines of " + p.Log + ":\n  " + strings.ReplaceAll(text, "\n", "\n  ")
}

// tail returns the last lines of a file; "" if it cannot be read.
func tail(path string) string {
	content, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(content)), "\n")
	return strings.Join(lines[max(0, len(lines)-shownLines):], "\n")
}

func (p *Process) signal(s syscall.Signal) error {
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("send %s to %s: %w", s, p.Name, err)
	}
	return nil
}

// line waits until the process has printed a line on standard output that starts
// with prefix, and returns the rest of it.
func (p *Process) line(ctx context.Context, prefix string) (string, error) {
	var rest string
	err := p.until(ctx, fmt.Sprintf("it printed %q", prefix), func(context.Context) error {
		content, err := os.ReadFile(p.Output)
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(content)) {
			var found bool
			if rest, found = strings.CutPrefix(line, prefix); found && strings.HasSuffix(line, "\n") {
				rest = strings.TrimSpace(rest)
				return nil
			}
		}
		return errors.New("it has not yet")
	})
	return rest, err
}

// until polls check, which returns nil once the process is ready, for at most startLimit.
// what completes the sentence "waited until ...".
func (p *Process) until(ctx context.Context, what string, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, startLimit, fmt.Errorf("not within %s", startLimit))
	defer cancel()
	ended := make(chan struct{})
	go func() { // ends the wait if the process exits
		defer close(ended)
		select {
		case <-p.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	err := Poll(ctx, what, check)
	cancel()
	<-ended
	select {
	case <-p.done:
		return p.ended()
	default:
	}
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", p.Name, err, p.lastLines())
	}
	p.ready.Store(true)
	return nil
}

// Poll calls check until it returns nil. If ctx ends first, the error names what was
// waited for, why the wait ended, and the last error of check.
func Poll(ctx context.Context, what string, check func(context.Context) error) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	var last error
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() == nil || last == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waited until %s: %w; last seen: %w", what, context.Cause(ctx), last)
		case <-tick.C:
		}
	}
}
