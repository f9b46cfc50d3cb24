// Package faults runs a bounded part of `make faults` with the other end-to-end
// tests: every kind of fault on a cluster of three nats-servers, at least once, and some
// on the embedded server.
package faults

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// These are far above what it takes, because build machines stall. The limit of a run
// is for its faults; then it heals, and starts and ends its processes beside.
const (
	faultLimit = 8 * time.Minute
	limit      = 13 * time.Minute
)

// TestFaults has one run after the other: each keeps the machine busy.
func TestFaults(t *testing.T) {
	for _, tc := range []struct {
		name, reason string
		args         []string
	}{
		{"cluster", "all that there is but etcd-restore, after which a machine may need its creation timeout", []string{
			"--seed=1", "--lifecycles=25", "--bus=cluster",
			"--kinds=kill-driver,freeze-driver,freeze-create,hung-call,freeze-mcm,freeze-nats,lose-nats,disk-full,name-reuse,fail-over,epoch-back," +
				"stray-manager,namesake,restart-api,cut-driver-nats,cut-mcm-nats,cut-nats-nats,cut-mcm-api,cut-driver-cloud,one-way,delay," +
				"cloud-errors,cloud-latency,cloud-rate,cloud-lists",
		}},
		{"embedded", "there is one mcm, and NATS goes with it", []string{
			"--seed=1", "--lifecycles=10", "--bus=embedded",
			"--kinds=kill-driver,freeze-driver,freeze-mcm,disk-full,roll-back-store,fail-over,epoch-back,cut-driver-nats,cloud-errors,cloud-lists",
		}},
	} {
		if out, err := run(t, tc.name, tc.args...); err != nil || !strings.HasSuffix(out, "lost 0 doubled 0 leaked 0 stuck 0\n") {
			t.Errorf("%s (%s): %v\n%s", tc.name, tc.reason, err, out)
		}
	}
}

// run runs the program of E2E_BIN, or else ours, and returns what it prints to standard
// output.
func run(t *testing.T, name string, args ...string) (string, error) {
	t.Helper()
	bin := "../../../../.out/bin"
	if given := os.Getenv("E2E_BIN"); given != "" {
		bin = given
	}
	program := filepath.Join(bin, "faults")
	if _, err := os.Stat(program); err != nil {
		t.Fatalf("not built: %v; run: make test-e2e", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, append(args, "--longest=4s", "--limit="+faultLimit.String(),
		"--repository=../../../..", "--bin="+bin, "--dir=../../../../.out/run/e2e-faults-"+name)...)
	// It is stopped, not killed, so that it ends its processes in order.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = time.Minute
	var out, problems bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problems
	began := time.Now()
	err := cmd.Run()
	t.Logf("%s took %s\n%s%s", name, time.Since(began).Round(time.Second), out.String(), problems.String())
	return out.String(), err
}
