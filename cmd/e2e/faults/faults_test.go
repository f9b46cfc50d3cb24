// Package faults runs a bounded part of `make faults` with the other end-to-end
// tests: every kind of fault on a cluster of three nats-servers, at least once, some on
// the embedded server, and what must come to damage.
package faults

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// limit is far above what it takes, because build machines stall.
const limit = 8 * time.Minute

// TestFaults has one run after the other: each keeps the machine busy.
func TestFaults(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, reason string
		args         []string
	}{
		{"cluster", "all that there is", []string{"--seed=1", "--lifecycles=25", "--bus=cluster"}},
		{"embedded", "there is one mcm, and NATS goes with it", []string{
			"--seed=1", "--lifecycles=10", "--bus=embedded",
			"--kinds=kill-driver,freeze-driver,freeze-mcm,fail-over,cut-driver-nats,cloud-errors,cloud-lists",
		}},
	} {
		if out, err := run(t, tc.name, "../../../.out/bin", tc.args...); err != nil || !strings.HasSuffix(out, "lost 0 doubled 0 leaked 0 stuck 0\n") {
			t.Errorf("%s (%s): %v\n%s", tc.name, tc.reason, err, out)
		}
	}
}

// TestUnfenced has replicas go on that may have been replaced: then a machine has two
// instances, or one when it is gone, and the judge says so. A replica that wakes up may
// hear first that its work is cancelled, so one run may show nothing.
func TestUnfenced(t *testing.T) {
	t.Parallel()
	const damaged = 1
	harm := regexp.MustCompile(`(?m)^lost \d+ doubled (\d+ leaked [1-9]|[1-9])`)
	for _, seed := range []string{"3", "4", "5"} {
		out, err := run(t, "unfenced", "../../../.out/unfenced", "--seed="+seed, "--lifecycles=3", "--each=2", "--bus=embedded", "--kinds=freeze-create")
		if end, ok := errors.AsType[*exec.ExitError](err); ok && end.ExitCode() == damaged && harm.MatchString(out) {
			return
		}
		if err != nil {
			t.Fatalf("seed %s: it ended with %v, want status %d with a machine doubled or leaked, or none\n%s", seed, err, damaged, out)
		}
	}
	t.Error("no machine is doubled or leaked without fencing")
}

// running is held by the run at work.
var running = make(chan struct{}, 1)

// run runs the program of E2E_BIN, or else ours, with those of bin, and returns what it
// prints to standard output.
func run(t *testing.T, name, bin string, args ...string) (string, error) {
	t.Helper()
	own := "../../../.out/bin"
	if given := os.Getenv("E2E_BIN"); given != "" {
		bin, own = strings.Replace(bin, own, given, 1), given
	}
	for _, needed := range []string{filepath.Join(own, "faults"), filepath.Join(bin, "driver-virtual")} {
		if _, err := os.Stat(needed); err != nil {
			t.Fatalf("not built: %v; run: make test-e2e", err)
		}
	}
	running <- struct{}{}
	defer func() { <-running }()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(own, "faults"), append(args, "--longest=4s", "--limit=3m",
		"--repository=../../..", "--bin="+bin, "--dir=../../../.out/run/e2e-faults-"+name)...)
	// It is told to stop rather than killed, so that it ends its processes in order.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = time.Minute
	var out, problems bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problems
	began := time.Now()
	err := cmd.Run()
	t.Logf("%s took %s\n%s%s", name, time.Since(began).Round(time.Second), out.String(), problems.String())
	return out.String(), err
}
