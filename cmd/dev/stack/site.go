package stack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// A Site is a set of processes and their folder. It is safe for concurrent use.
type Site struct {
	bin, dir string
	detached bool
	onStart  func(*Process) error

	mu        sync.Mutex
	processes []*Process
}

// SiteOptions configure a Site.
type SiteOptions struct {
	// Bin is the folder of the built programs.
	Bin string
	// Dir is the folder for logs and data. It is emptied first.
	Dir string
	// Detached processes outlive this one.
	Detached bool
	// OnStart is called right after the start of each process, which is stopped if it
	// returns an error. It may be nil.
	OnStart func(*Process) error
}

// NewSite creates the folder. Close ends the processes.
func NewSite(o SiteOptions) (*Site, error) {
	bin, err := filepath.Abs(o.Bin)
	if err != nil {
		return nil, fmt.Errorf("folder of the programs: %w", err)
	}
	dir, err := filepath.Abs(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("run folder: %w", err)
	}
	if err := os.RemoveAll(dir); err != nil {
		return nil, fmt.Errorf("empty the run folder: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the run folder: %w", err)
	}
	return &Site{bin: bin, dir: dir, detached: o.Detached, onStart: o.OnStart}, nil
}

// Missing returns the programs of names that are not built.
func Missing(bin string, names ...string) []string {
	var missing []string
	for _, name := range names {
		if info, err := os.Stat(filepath.Join(bin, name)); err != nil || info.IsDir() {
			missing = append(missing, name)
		}
	}
	return missing
}

// Dir returns the Site's folder.
func (s *Site) Dir() string { return s.dir }

// Program returns the path of a built program. An absolute path, which is a program of
// the system, is returned unchanged.
func (s *Site) Program(name string) string {
	if filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(s.bin, name)
}

// path returns the path of a file in the Site's folder.
func (s *Site) path(name string) string { return filepath.Join(s.dir, name) }

// writeSecret writes a secret to a file that only its owner can read, and returns its
// path.
func (s *Site) writeSecret(name, content string) (string, error) {
	path := filepath.Join(s.path("private"), name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return "", fmt.Errorf("make a folder for secrets: %w", err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		return "", fmt.Errorf("write a secret: %w", err)
	}
	return path, nil
}

// Start runs a built program under a unique name. It returns at once.
func (s *Site) Start(name, program string, args ...string) (*Process, error) {
	return s.start(command{name: name, program: program, args: args})
}

// start runs a command until Close.
func (s *Site) start(c command) (*Process, error) {
	s.mu.Lock()
	taken := slices.ContainsFunc(s.processes, func(p *Process) bool { return p.Name == c.name })
	s.mu.Unlock()
	if taken {
		return nil, fmt.Errorf("start %s: a process with that name already runs", c.name)
	}
	p, err := start(s.dir, c, s.Program(c.program), s.detached)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	s.processes = append(s.processes, p)
	s.mu.Unlock()
	if s.onStart != nil {
		if err := s.onStart(p); err != nil {
			return nil, errors.Join(err, p.Stop())
		}
	}
	return p, nil
}

// Restart runs the command of an ended process again, with args added. The new process
// takes the place of the ended one in the order of Close: processes that depend on it
// were started later and are stopped earlier.
func (s *Site) Restart(p *Process, args ...string) (*Process, error) {
	select {
	case <-p.done:
	default:
		return nil, fmt.Errorf("%s still runs: stop it before a restart", p.Name)
	}
	s.mu.Lock()
	place := slices.Index(s.processes, p)
	s.mu.Unlock()
	s.forget(p)
	c := p.command
	c.args = append(slices.Clone(c.args), args...)
	c.again++
	again, err := s.start(c)
	if err != nil {
		return nil, err
	}
	s.forget(again)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.processes = slices.Insert(s.processes, max(0, min(place, len(s.processes))), again)
	return again, nil
}

// forget removes an ended process, so that its name can be used again.
func (s *Site) forget(p *Process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.processes = slices.DeleteFunc(s.processes, func(q *Process) bool { return q == p })
}

// startOnFreePorts runs the command that plan returns for n free ports, and waits with
// ready. If another process has taken a port meanwhile, it tries other ports.
func (s *Site) startOnFreePorts(
	ctx context.Context, n int, plan func(ports []int) command, ready func(context.Context, *Process, []int) error,
) (*Process, []int, error) {
	const tries = 3
	for try := 1; ; try++ {
		ports, err := freePorts(n)
		if err != nil {
			return nil, nil, err
		}
		p, err := s.start(plan(ports))
		if err != nil {
			return nil, nil, err
		}
		err = ready(ctx, p, ports)
		if err == nil {
			return p, ports, nil
		}
		if try == tries || !portTaken(p.lastLines()) {
			return nil, nil, err
		}
		s.forget(p) // it has exited because of the port
	}
}

// portTaken reports whether a log contains such an error of the system or of devcluster.
func portTaken(log string) bool {
	return strings.Contains(log, "address already in use") || strings.Contains(log, "is taken; choose another --")
}

// Close ends all processes, the newest first, and returns the errors of Stop. It keeps
// the files.
func (s *Site) Close() error {
	s.mu.Lock()
	processes := slices.Clone(s.processes)
	s.processes = nil
	s.mu.Unlock()
	var errs []error
	for _, p := range slices.Backward(processes) {
		errs = append(errs, p.Stop())
	}
	return errors.Join(errs...)
}

// Failed returns the error of the first process that exited unexpectedly; nil if there is
// none.
func (s *Site) Failed() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.processes {
		if err := p.Failure(); err != nil {
			return err
		}
	}
	return nil
}

// Poll is like [Poll], but fails at once if one of the processes exits unexpectedly.
func (s *Site) Poll(ctx context.Context, what string, check func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	err := Poll(ctx, what, func(ctx context.Context) error {
		if err := s.Failed(); err != nil {
			cancel()
			return err
		}
		return check(ctx)
	})
	if failed := s.Failed(); err != nil && failed != nil {
		return fmt.Errorf("while waiting until %s: %w", what, failed)
	}
	return err
}
