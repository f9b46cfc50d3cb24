// Package faults runs a bounded part of `make faults` with the other end-to-end
// tests: every kind of fault on a cluster of three nats-servers, at least once.
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

// limit is far above what it takes, because build machines stall.
const limit = 8 * time.Minute

func TestFaults(t *testing.T) {
	t.Parallel()
	bin := "../../../.out/bin"
	if given := os.Getenv("E2E_BIN"); given != "" {
		bin = given
	}
	program := filepath.Join(bin, "faults")
	if _, err := os.Stat(program); err != nil {
		t.Fatalf("not built: %v; run: make test-e2e", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, "--seed=1", "--lifecycles=25", "--bus=cluster", "--longest=4s",
		"--limit=3m", "--repository=../../..", "--bin="+bin, "--dir=../../../.out/run/e2e-faults")
	// It is told to stop rather than killed, so that it ends its processes in order.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = time.Minute
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	t.Log(out.String())
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "lost 0 doubled 0 leaked 0 stuck 0\n") {
		t.Error("the verdict is missing")
	}
}
