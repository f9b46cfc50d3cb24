package mutants

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

var run = flag.Bool("mutants.run", false, "run the tests against each mutation, which takes minutes")

// A mutation breaks one rule of bus/SAFETY.md in one place.
type mutation struct {
	name, file, old, mutated string
	tests                    string // that must catch it: any of them
}

// A mutation makes some tests wait for what never comes, which bounds a run. All tests
// together pass without one.
const (
	onceTime = 5 * time.Minute
	allTime  = 20 * time.Minute
)

var failed = regexp.MustCompile(`(?m)^(?:--- FAIL: |panic: )(.+)`)

// TestApply sees to it that no mutation rots: each one's text is in its file, once, and
// bus/SAFETY.md lists it.
func TestApply(t *testing.T) {
	t.Parallel()
	listed, err := os.ReadFile("../SAFETY.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range mutations {
		m.apply(t)
		if row := []byte("| " + m.name + " | "); !bytes.Contains(listed, row) {
			t.Errorf("bus/SAFETY.md has no row for the mutation %q", m.name)
		}
	}
}

// TestCaught runs the tests that must catch each mutation; unmutated code passes them first.
func TestCaught(t *testing.T) { //nolint:paralleltest // one at a time, so that the processor is not shared
	if !*run {
		t.Skip("runs with -mutants.run: make mutants")
	}
	names := map[string]bool{}
	for _, m := range mutations {
		for name := range strings.SplitSeq(m.tests, "|") {
			names[name] = true
		}
	}
	all := make([]string, 0, len(names))
	for name := range names {
		all = append(all, name)
	}
	if out, err := try(t, build(t, nil), strings.Join(all, "|"), allTime); err != nil {
		t.Fatalf("the code without a mutation must pass first: %v\n%s", err, out)
	}
	for _, m := range mutations {
		t.Run(m.name, func(t *testing.T) {
			started := time.Now()
			out, err := try(t, build(t, &m), m.tests, onceTime)
			by := failed.FindSubmatch(out)
			if err == nil || by == nil {
				t.Fatalf("survives: %s in %s; add a test that sees it (%v)\n%s", m.mutated, m.file, err, out)
			}
			t.Logf("%-28s caught by %-60s in %s", m.name, by[1], time.Since(started).Round(time.Second))
		})
	}
}

// apply returns the path of the mutation's file and what stands in it then.
func (m mutation) apply(t *testing.T) (path string, text []byte) {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("..", m.file))
	if err != nil {
		t.Fatal(err)
	}
	text, err = os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(text, []byte(m.old)); n != 1 {
		t.Fatalf("mutation %q: its text is %d times in bus/%s, not once; write the mutation for the code as it is: %s", m.name, n, m.file, m.old)
	}

	return path, bytes.Replace(text, []byte(m.old), []byte(m.mutated), 1)
}

// tested are the packages whose tests have to catch mutations.
var tested = []string{"caller", "replica"}

// build makes the tests of each tested package in dir, with a mutation or without one.
func build(t *testing.T, m *mutation) (dir string) {
	t.Helper()
	dir = t.TempDir()
	replaced := map[string]string{}
	if m != nil {
		path, text := m.apply(t)
		copied := filepath.Join(dir, "mutated.go")
		if err := os.WriteFile(copied, text, 0o600); err != nil {
			t.Fatal(err)
		}
		replaced[path] = copied
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replaced})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range tested {
		build := exec.CommandContext(t.Context(), "go", "test", "-c", "-overlay", filepath.Join(dir, "overlay.json"),
			"-o", filepath.Join(dir, name), "../"+name)
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("a mutation has to compile: %v\n%s", err, out)
		}
	}

	return dir
}

// try runs tests of the packages built in dir, up to the first that fails. Only a failed test
// or a panic makes a line that failed matches.
func try(t *testing.T, dir, tests string, limit time.Duration) (out []byte, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	for _, name := range tested {
		test := exec.CommandContext(ctx, filepath.Join(dir, name), "-test.failfast", "-test.run", "^("+tests+")$")
		test.Dir = "../" + name
		if out, err = test.CombinedOutput(); err != nil {
			break
		}
	}

	return out, err //nolint:wrapcheck // the test's own
}
