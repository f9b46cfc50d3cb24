package stack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// roles are programs that the tests start: this test binary, under other names.
var roles = map[string]func() int{
	"obedient": func() int { return untilTerm(0) },
	"failing":  func() int { defer fmt.Fprintln(os.Stderr, "could not save"); return untilTerm(3) },
	"careless": func() int { fmt.Println("ready 42"); select {} }, // SIGTERM ends it
	"fleeting": func() int { fmt.Println("ready 42"); fmt.Fprintln(os.Stderr, "the disk is full"); return 0 },
	"unready":  func() int { fmt.Fprintln(os.Stderr, "no such file"); return 4 },
	"parent":   parent,
	"printenv": func() int { fmt.Println(os.Environ()); return 0 },
}

func TestMain(m *testing.M) {
	if role, ok := roles[filepath.Base(os.Args[0])]; ok {
		os.Exit(role())
	}
	os.Exit(m.Run())
}

func untilTerm(code int) int {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM)
	fmt.Println("ready 42")
	<-signals
	return code
}

// parent starts a child, prints its process id and waits to be killed.
func parent() int {
	site, err := NewSite(SiteOptions{Bin: filepath.Dir(os.Args[0]), Dir: os.Args[1]})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	child, err := site.Start("child", "careless")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("ready", child.PID())
	select {}
}

func newTestSite(t *testing.T) *Site {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	bin := t.TempDir()
	for name := range roles {
		if err := os.Symlink(self, filepath.Join(bin, name)); err != nil {
			t.Fatal(err)
		}
	}
	s, err := NewSite(SiteOptions{Bin: bin, Dir: filepath.Join(t.TempDir(), "run")})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func startRole(t *testing.T, s *Site, role string, args ...string) *Process {
	t.Helper()
	p, err := s.Start(role, role, args...)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestClose(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason  string
		wantErr string // part of the error; empty for none
	}{
		"obedient": {reason: "it ends well when asked"},
		"careless": {reason: "it leaves SIGTERM to the kernel, which is no failure"},
		"failing":  {reason: "a failure while stopping must not go unnoticed", wantErr: "could not save"},
		"fleeting": {reason: "it was not asked to exit", wantErr: "the disk is full"},
	}
	for role, c := range cases {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			s := newTestSite(t)
			p := startRole(t, s, role)
			// A process that has printed its line and exited counts as exited.
			if _, err := p.line(t.Context(), "ready "); err != nil && role != "fleeting" {
				t.Fatal(err)
			}
			if role == "fleeting" {
				<-p.Done()
				if err := s.Failed(); err == nil {
					t.Errorf("Failed() = nil: %s", c.reason)
				}
			}
			err := s.Close()
			if (err != nil) != (c.wantErr != "") || err != nil && !strings.Contains(err.Error(), c.wantErr) {
				t.Errorf("Close() = %v, want %q in it: %s", err, c.wantErr, c.reason)
			}
			select {
			case <-p.Done():
			default:
				t.Error("it still runs")
			}
		})
	}
}

func TestLine(t *testing.T) {
	t.Parallel()
	s := newTestSite(t)
	if got, err := startRole(t, s, "obedient").line(t.Context(), "ready "); err != nil || got != "42" {
		t.Errorf("line() = %q, %v, want 42", got, err)
	}
	_, err := startRole(t, s, "unready").line(t.Context(), "ready ")
	if err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("line() = %v, want the end of the log of the program that did not start", err)
	}
	if _, err := s.Start("obedient", "obedient"); err == nil {
		t.Error("Start() = nil for a name that is taken: both would write one log")
	}
	if err := s.Close(); err == nil {
		t.Error("Close() = nil, although a program exited by itself")
	}
}

// TestKill has a paused process be killed and one resumed and stopped.
func TestKill(t *testing.T) {
	t.Parallel()
	s := newTestSite(t)
	p := startRole(t, s, "obedient")
	for _, step := range []func() error{p.Pause, p.Kill} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	q := startRole(t, s, "careless")
	for _, step := range []func() error{q.Pause, q.Stop, s.Close} { // Stop must wake it up
		if err := step(); err != nil {
			t.Error(err)
		}
	}
}

// TestOrphans: a process does not outlive the one that started it.
func TestOrphans(t *testing.T) {
	t.Parallel()
	s := newTestSite(t)
	p := startRole(t, s, "parent", filepath.Join(t.TempDir(), "run"))
	text, err := p.line(t.Context(), "ready ")
	if err != nil {
		t.Fatal(err)
	}
	child, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err = Poll(ctx, "the orphan is gone", func(context.Context) error {
		if _, err := startTime(child); err == nil {
			return errors.New("it runs")
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestRecorded(t *testing.T) {
	t.Parallel()
	s := newTestSite(t)
	p := startRole(t, s, "obedient")
	if _, err := p.line(t.Context(), "ready "); err != nil {
		t.Fatal(err)
	}
	r, err := p.Record()
	if err != nil {
		t.Fatal(err)
	}
	other, another := r, r
	other.Started++
	another.Boot = "before"
	for name, stranger := range map[string]Recorded{"another start": other, "another boot": another} {
		if stranger.Alive() {
			t.Errorf("%s: Alive() = true: the process id is another process's now", name)
		}
		if err := stranger.Stop(); err != nil {
			t.Errorf("%s: Stop() = %v", name, err)
		}
	}
	select {
	case <-p.Done():
		t.Fatal("a process that only has the same id was ended")
	default:
	}
	p.ExpectEnd()
	for range 2 { // the second time there is nothing to do
		if err := r.Stop(); err != nil || r.Alive() {
			t.Errorf("Stop() = %v, alive: %v", err, r.Alive())
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

func TestLock(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "lock")
	release, err := Lock(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Lock(path); err == nil {
		t.Error("Lock() = nil, although it is locked")
	} else if locked, ok := errors.AsType[*LockedError](err); !ok || locked.Holder != strconv.Itoa(os.Getpid()) {
		t.Errorf("Lock() = %v, want the holder", err)
	}
	// As a child has it between fork and exec.
	fds, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	copies := 0
	for _, fd := range fds {
		if target, err := os.Readlink(fd); err != nil || target != path {
			continue
		}
		number, err := strconv.Atoi(filepath.Base(fd))
		if err != nil {
			t.Fatal(err)
		}
		descriptor, err := syscall.Dup(number)
		if err != nil {
			t.Fatal(err)
		}
		copies++
		t.Cleanup(func() { _ = syscall.Close(descriptor) })
	}
	if copies == 0 {
		t.Error("no descriptor of the lock file was found to copy")
	}
	release()
	if release, err = Lock(path); err != nil {
		t.Fatalf("after release: %v", err)
	}
	release()
}

func TestEnvironment(t *testing.T) {
	t.Setenv("KUBECONFIG", "/production")
	s := newTestSite(t)
	p := startRole(t, s, "printenv")
	p.ExpectEnd()
	<-p.Done()
	text, err := os.ReadFile(p.Output)
	if err != nil || strings.Contains(string(text), "KUBECONFIG") || !strings.Contains(string(text), "PATH=") {
		t.Errorf("environment %q, %v: want PATH, and nothing that points to another cluster", text, err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
