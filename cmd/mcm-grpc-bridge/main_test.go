package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/machinebus/machinebus/bus/bustest"
)

// The bridge and its clients run as processes, which are this test's own program.
const (
	roleVariable    = "BRIDGE_TEST_ROLE"
	addressVariable = "BRIDGE_TEST_ADDRESS"
	kindVariable    = "BRIDGE_TEST_KIND"
	caVariable      = "BRIDGE_TEST_CA"
)

var roles = map[string]func() error{
	"bridge":  func() error { main(); return nil },
	"infra":   func() error { return runClient(serveInfra) },
	"service": func() error { return runClient(serveService) },
}

func TestMain(m *testing.M) {
	role, ok := roles[os.Getenv(roleVariable)]
	if !ok {
		flag.Parse()
		os.Exit(m.Run())
	}
	// The test holds the other end. End-to-end tests run clients, too, and end them by themselves.
	if stdin, err := os.Stdin.Stat(); err == nil && stdin.Mode()&os.ModeNamedPipe != 0 {
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin)
			os.Exit(3)
		}()
	}
	if err := role(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// A process is a child of the test.
type process struct {
	t       *testing.T
	cmd     *exec.Cmd
	done    chan struct{} // closed when it has ended
	replica string        // of a client

	mu    sync.Mutex
	lines []string
}

// start runs a child until the test ends.
func start(t *testing.T, role string, env []string, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.Command(os.Args[0], args...), done: make(chan struct{})}
	p.cmd.Env = append(append(os.Environ(), roleVariable+"="+role), env...)
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.done)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			p.mu.Lock()
			p.lines = append(p.lines, lines.Text())
			p.mu.Unlock()
		}
		_ = p.cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = stdin.Close()
		p.kill()
		if t.Failed() {
			t.Logf("%s said:\n%s", role, p.output())
		}
	})

	return p
}

// kill ends the process as a crash does.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	bustest.Receive(p.t, "the end of a child", p.done)
}

// terminate asks the process to end, and returns how it did.
func (p *process) terminate() error {
	p.t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		p.t.Fatal(err)
	}
	bustest.Receive(p.t, "the end of a child", p.done)
	if code := p.cmd.ProcessState.ExitCode(); code != 0 {
		return fmt.Errorf("exit code %d", code)
	}

	return nil
}

func (p *process) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()

	return strings.Join(p.lines, "\n")
}

// await returns an attribute of the first line of a JSON log with this message.
func (p *process) await(message, attribute string) (value string) {
	p.t.Helper()
	bustest.Eventually(p.t, fmt.Sprintf("the line %q", message), func() bool {
		for line := range strings.Lines(p.output()) {
			var fields map[string]any
			if json.Unmarshal([]byte(line), &fields) == nil && fields["msg"] == message {
				value = fmt.Sprint(fields[attribute])

				return true
			}
		}

		return false
	})

	return value
}
