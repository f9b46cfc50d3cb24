package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// TestNewDriver follows the README.md that mcmctl new driver writes: it builds the driver, tries it with the fake cloud until a
// Machine is Running, deletes the Machine and stops everything. Only the ports differ.
func TestNewDriver(t *testing.T) {
	t.Parallel()
	dir := writeNewDriver(t)
	readme, err := os.ReadFile(filepath.Join(dir, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	commands := shellOf(t, string(readme), "## Build it\n", "## Try it on this machine\n")
	for _, port := range []string{":4222", "=10258", ":8080"} {
		if !strings.Contains(commands, port) {
			t.Fatalf("no command of the README.md has the port %s", port)
		}
		free, err := stack.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		commands = strings.ReplaceAll(commands, port, fmt.Sprintf("%c%d", port[0], free))
	}
	out := runCommands(t, dir, commands)
	for _, want := range []string{"my-cloud-01   Running", `"my-cloud-01" deleted`} {
		if !strings.Contains(out, want) {
			t.Errorf("want %q:\n%s", want, out)
		}
	}
}

// writeNewDriver writes a driver next to what it needs of a clone of this repository, and returns its folder.
func writeNewDriver(t *testing.T) string {
	t.Helper()
	parent := t.TempDir()
	clone := filepath.Join(parent, "machinebus")
	if err := os.MkdirAll(filepath.Join(clone, ".out"), 0o700); err != nil {
		t.Fatal(err)
	}
	links := map[string]string{".out/bin": shared.bin}
	for _, folder := range []string{"proto", "bus", "driversdk", "deploy"} {
		links[folder] = "../../../" + folder
	}
	for name, to := range links {
		to, err := filepath.Abs(to)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(to, filepath.Join(clone, name)); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(clone, ".out", "bin", "mcmctl"), "new", "driver", "my-cloud")
	cmd.Dir = parent
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("mcmctl new driver: %v\n%s", err, out)
	}
	return filepath.Join(parent, "driver-my-cloud")
}

// shellOf returns the commands in these sections of a document. It leaves out those that run make, which has built the programs
// of this test already, and the driver's own tests, which the package of mcmctl new driver runs.
func shellOf(t *testing.T, document string, sections ...string) string {
	t.Helper()
	var commands strings.Builder
	for _, section := range sections {
		_, text, found := strings.Cut(document, section)
		if !found {
			t.Fatalf("the document has no section %q", section)
		}
		text, _, _ = strings.Cut(text, "\n## ")
		for _, block := range strings.Split(text, "```sh\n")[1:] {
			block, _, _ = strings.Cut(block, "```")
			if !strings.HasPrefix(block, "make ") && !strings.HasPrefix(block, "go test ") {
				commands.WriteString(block)
			}
		}
	}
	return commands.String()
}

// runCommands runs commands in bash until one fails, and returns their output. What they leave running ends with the test.
func runCommands(t *testing.T, dir, commands string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n"+commands)
	// Modules that no go.sum names yet come from the module cache, without a question to a server.
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOWORK=off", "GONOSUMDB=*", "CGO_ENABLED=0")
	// Not SIGKILL, which would keep bash from ending the others. Ctrl-C in a terminal reaches them all.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = patience
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("the commands of the README.md fail: %v\n%s%s", err, out, logsOf(dir))
	}
	return string(out)
}

// logsOf returns the ends of the logs that the commands of the README.md write.
func logsOf(dir string) string {
	const most = 2000
	var text strings.Builder
	files, _ := filepath.Glob(filepath.Join(dir, ".try", "*.log")) // the pattern is valid
	for _, file := range files {
		content, _ := os.ReadFile(file) // what can be read helps
		fmt.Fprintf(&text, "\n%s:\n%s", filepath.Base(file), content[max(0, len(content)-most):])
	}
	return text.String()
}
