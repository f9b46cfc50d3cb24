package main

import (
	"context"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// A driver of the machine controller manager keeps the contract but for the exceptions that
// its module names.
func TestMCMDriver(t *testing.T) {
	t.Parallel()
	exceptions, err := readExceptions("../../driversdk/mcmdriver/exceptions.yaml")
	if err != nil {
		t.Fatal(err)
	}
	wantConforming(t, checked{
		provider: "sample", otherCluster: "other", env: "MACHINEBUS_SLOTS=4",
		command: []string{buildMCMDriver(t), "--clusters=default,other", "--log-level=error"},
		tags:    `{"kubernetes.io/cluster/checked":"1"}`, except: exceptions,
		skipped: []string{"IDENTITY-", "SUBJECT-3", "MIGRATECLASS-", "GROUP-", "INSTANCES-", "RESIZE-", "REMOVE-"},
	})
}

// buildMCMDriver builds the sample of the module, which has Kubernetes libraries of its own.
func buildMCMDriver(t *testing.T) (program string) {
	t.Helper()
	program = filepath.Join(t.TempDir(), "sample")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	build := exec.CommandContext(ctx, "go", "build", "-C", "../../driversdk/mcmdriver", "-o", program, "./sample")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", build, err, out)
	}

	return program
}
