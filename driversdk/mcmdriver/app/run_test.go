package app_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/driversdk/drivertest"
)

// limit bounds the build and the run.
const limit = 5 * time.Minute

// An unchanged main of the machine controller manager's drivers becomes a driver of the bus
// when run.go takes the place of the package that it ends in: by the steps in README.md.
func TestReplacedPackage(t *testing.T) {
	t.Parallel()
	const mcm = "github.com/gardener/machine-controller-manager"
	dir := t.TempDir()
	replaced, mod, program := filepath.Join(dir, "mcm"), filepath.Join(dir, "bus.mod"), filepath.Join(dir, "driver")
	if err := os.CopyFS(replaced, os.DirFS(strings.TrimSpace(run(t, "go", "list", "-m", "-f", "{{.Dir}}", mcm)))); err != nil {
		t.Fatal(err)
	}
	for from, to := range map[string]string{
		"run.go":    filepath.Join(replaced, "pkg", "util", "provider", "app", "app.go"),
		"../go.mod": mod, "../go.sum": filepath.Join(dir, "bus.sum"),
	} {
		content, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(to); err != nil && !os.IsNotExist(err) { // it is read-only, like all of the module cache
			t.Fatal(err)
		}
		if err := os.WriteFile(to, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	run(t, "go", "mod", "edit", "-replace="+mcm+"="+replaced, mod)
	run(t, "go", "build", "-modfile="+mod, "-o", program, "./testdata/controller")

	natsURL := bustest.Server(t, embedded.Options{}).URL()
	// Flags of a controller change nothing.
	driver := exec.Command(program, "--control-kubeconfig=/nowhere", "--machine-creation-timeout=20m")
	driver.Env = append(os.Environ(), "NATS_URL="+natsURL, "MACHINEBUS_PROVIDER=Fake")
	driver.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var output strings.Builder
	driver.Stdout, driver.Stderr = &output, &output
	runtime.LockOSThread() // the signal of a parent's death comes when this thread ends
	defer runtime.UnlockOSThread()
	if err := driver.Start(); err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(limit, func() { _ = driver.Process.Kill() })
	defer late.Stop()
	drivertest.Run(t, drivertest.Config{
		NATS: bus.Config{URLs: []string{natsURL}}, Provider: "fake", Only: []string{"SUBJECT-1", "STATUS-2", "DELETE-1"},
		Class: drivertest.Class{Namespace: "ns", Name: "small", ProviderSpec: []byte(`{}`)},
	})
	if err := driver.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	if err := driver.Wait(); err != nil {
		t.Errorf("the driver ended with %v after SIGTERM:\n%s", err, output.String())
	}
}

// run returns what a command prints.
func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, stderr.String())
	}

	return string(out)
}
