package modules

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	limit = 5 * time.Minute // of a command: some fetch modules
	root  = "../../.."
	path  = "github.com/machinebus/machinebus"
)

// folders of the modules of a release, as in the Makefile.
var folders = []string{"proto", "bus", "driversdk", "driversdk/mcmdriver", "."}

// anothers are the folders of modules whose libraries have the versions of another project.
var anothers = []string{"driversdk/mcmdriver"}

// A modFile is what `go mod edit -json` prints of a go.mod file.
type modFile struct {
	Require []struct {
		Path    string `json:"Path"`
		Version string `json:"Version"`
	} `json:"Require"`
}

// TestSameVersions has all modules use one version of a library: one build and one test of it
// count for all of them.
func TestSameVersions(t *testing.T) {
	t.Parallel()
	seen := map[string]string{}
	for _, folder := range folders {
		if slices.Contains(anothers, folder) {
			continue
		}
		var mod modFile
		if err := json.Unmarshal([]byte(run(t, filepath.Join(root, folder), nil, "go", "mod", "edit", "-json")), &mod); err != nil {
			t.Fatal(err)
		}
		for _, r := range mod.Require {
			if other, ok := seen[r.Path]; ok && other != r.Version {
				t.Errorf("%s/go.mod has %s %s, another module has %s", folder, r.Path, r.Version, other)
			}
			seen[r.Path] = r.Version
		}
	}
}

// TestDriversHaveNoKubernetes has none of Kubernetes' modules in the module graph of a driver.
func TestDriversHaveNoKubernetes(t *testing.T) {
	t.Parallel()
	graph := run(t, filepath.Join(root, "driversdk"), nil, "go", "mod", "graph")
	if !strings.Contains(graph, "github.com/nats-io/nats.go@") {
		t.Fatalf("this is no module graph of a driver:\n%s", graph)
	}
	for line := range strings.Lines(graph) {
		if strings.Contains(line, " k8s.io/") || strings.Contains(line, " sigs.k8s.io/") {
			t.Errorf("a driver's module graph has %s", line)
		}
	}
}

// TestRelease tags a release and uses it over git, without this tree: as a library, and as a
// program. It builds with -trimpath: what is compiled then serves each run, whatever the folder
// of its module cache.
func TestRelease(t *testing.T) {
	t.Parallel()
	const version, older = "v0.98.0-test.1", "v0.34.1"
	repository := copyTree(t)
	git := []string{"GIT_AUTHOR_NAME=test", "GIT_AUTHOR_EMAIL=test@example.com", "GIT_COMMITTER_NAME=test", "GIT_COMMITTER_EMAIL=test@example.com"}
	run(t, repository, git, "git", "init", "--quiet")
	run(t, repository, git, "git", "add", "--all", "--force")
	run(t, repository, git, "git", "commit", "--quiet", "--message", "all")
	wantNoRelease(t, repository, git, "a module before one that it requires", "module bus has a replace line", version, "bus", "proto")
	release := append([]string{version}, folders...)
	run(t, repository, git, append([]string{"./.tools/release.sh"}, release...)...)
	wantReplaced(t, repository)
	wantNoRelease(t, repository, git, "the same release again", "is there already", release...)

	env := consumerEnv(t, repository)
	t.Run("library", func(t *testing.T) {
		t.Parallel()
		requireRelease(t, env, version, older)
	})
	t.Run("program", func(t *testing.T) {
		t.Parallel()
		installRelease(t, repository, env, version)
	})
}

// wantNoRelease wants release.sh to fail, and to leave no commit and no tag.
func wantNoRelease(t *testing.T, repository string, git []string, reason, says string, args ...string) {
	t.Helper()
	state := func() string {
		return run(t, repository, git, "git", "status", "--porcelain") + run(t, repository, git, "git", "show-ref", "--head")
	}
	before := state()
	out, err := command(t, repository, git, append([]string{"./.tools/release.sh"}, args...)...).CombinedOutput()
	if err == nil || !strings.Contains(string(out), says) {
		t.Errorf("%s: want %q in the error: %v\n%s", reason, says, err, out)
	}
	if after := state(); after != before {
		t.Errorf("%s changed the repository from\n%sto\n%s", reason, before, after)
	}
}

// wantReplaced wants the modules tied together again after a release.
func wantReplaced(t *testing.T, repository string) {
	t.Helper()
	for _, folder := range folders[1:] { // proto requires none of the others
		if text := run(t, filepath.Join(repository, folder), nil, "go", "mod", "edit", "-print"); !strings.Contains(text, "=> ") {
			t.Errorf("module %s has no replace line after the release:\n%s", folder, text)
		}
	}
}

// installRelease installs a program of the release, and has a checkout of its tag complete.
func installRelease(t *testing.T, repository string, env []string, version string) {
	t.Helper()
	bin := t.TempDir()
	run(t, bin, append([]string{"GOBIN=" + bin, "CGO_ENABLED=0"}, env...), "go", "install", "-trimpath", path+"/cmd/driver-virtual@"+version)
	run(t, bin, nil, filepath.Join(bin, "driver-virtual"), "-h")

	checkout := filepath.Join(t.TempDir(), "checkout")
	run(t, bin, nil, "git", "clone", "--quiet", "--branch", version, repository, checkout)
	run(t, checkout, env, "go", "list", "-mod=readonly", "-deps", "./cmd/driver-virtual")
}

// requireRelease requires the release in a module that is pinned to an older Kubernetes.
func requireRelease(t *testing.T, env []string, version, older string) {
	t.Helper()
	consumer := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":  fmt.Sprintf("module example.com/driver\n\ngo 1.26.0\n\nrequire (\n\tk8s.io/client-go %s\n\t%s/driversdk %s\n)\n", older, path, version),
		"main.go": "package main\n\nimport (\n\t_ \"" + path + "/driversdk\"\n\t_ \"k8s.io/client-go/rest\"\n)\n\nfunc main() {}\n",
	} {
		if err := os.WriteFile(filepath.Join(consumer, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	run(t, consumer, env, "go", "mod", "tidy")
	got := run(t, consumer, env, "go", "list", "-m", "k8s.io/client-go", path+"/driversdk", path+"/bus", path+"/proto")
	want := []string{"k8s.io/client-go " + older, path + "/driversdk " + version, path + "/bus " + version, path + "/proto " + version}
	if !slices.Equal(strings.Split(strings.TrimSpace(got), "\n"), want) {
		t.Errorf("the consumer uses\n%swant\n%s", got, strings.Join(want, "\n"))
	}
	run(t, consumer, env, "go", "build", "-trimpath", "-o", os.DevNull, ".")
}

// consumerEnv is the environment of a consumer: our modules come out of the repository by git.
// All others come from this machine's module cache, or else from its proxy. What is fetched
// goes into a cache of the test's own, as the release exists nowhere else.
func consumerEnv(t *testing.T, repository string) []string {
	t.Helper()
	var goenv struct {
		ModCache string `json:"GOMODCACHE"`
		Proxy    string `json:"GOPROXY"`
	}
	if err := json.Unmarshal([]byte(run(t, root, nil, "go", "env", "-json", "GOMODCACHE", "GOPROXY")), &goenv); err != nil {
		t.Fatal(err)
	}

	return []string{
		"GOWORK=off", "GOFLAGS=-mod=mod -modcacherw", "GOMODCACHE=" + t.TempDir(), "GOPRIVATE=" + path, "GONOSUMDB=*",
		"GOPROXY=file://" + filepath.ToSlash(goenv.ModCache) + "/cache/download," + goenv.Proxy,
		"GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=url." + repository + ".insteadOf", "GIT_CONFIG_VALUE_0=https://" + path,
	}
}

// copyTree copies the files of this tree that git has or would add.
func copyTree(t *testing.T) (to string) {
	t.Helper()
	to = t.TempDir()
	names := map[string]bool{}
	for name := range strings.SplitSeq(run(t, root, nil, "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"), "\x00") {
		names[name] = true
	}
	delete(names, "")
	for _, name := range slices.Sorted(maps.Keys(names)) {
		from := filepath.Join(root, name)
		content, err := os.ReadFile(from)
		if os.IsNotExist(err) {
			continue // deleted, and not yet committed
		}
		if err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(from)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Dir(filepath.Join(to, name)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(to, name), content, info.Mode()); err != nil {
			t.Fatal(err)
		}
	}

	return to
}

// run runs a command and returns what it prints.
func run(t *testing.T, dir string, env []string, args ...string) string {
	t.Helper()
	cmd := command(t, dir, env, args...)
	var problems strings.Builder
	cmd.Stderr = &problems
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s%s", strings.Join(args, " "), err, out, problems.String())
	}

	return string(out)
}

func command(t *testing.T, dir string, env []string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)

	return cmd
}
