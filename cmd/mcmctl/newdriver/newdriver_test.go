package newdriver

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/format"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	_ "github.com/machinebus/machinebus/driversdk/drivertest" // so that a cached result does not outlive a change of it
)

const (
	// tree is the repository's root.
	tree = "../../.."
	// limit bounds a command: some compile much.
	limit = 8 * time.Minute
	path  = "github.com/machinebus/machinebus"
)

func TestDriver_Validate(t *testing.T) {
	t.Parallel()
	const module = "example.com/driver-acme"
	for name, tc := range map[string]struct {
		reason string
		driver Driver
		says   string // empty: nothing is wrong
	}{
		"short":         {"a letter is a name", Driver{"a", module}, ""},
		"dashes":        {"a DNS label may have some", Driver{"my-2nd-cloud", module}, ""},
		"no name":       {"NATS subjects need one", Driver{"", module}, `name ""`},
		"upper case":    {"providers are in lower case", Driver{"Acme", module}, `name "Acme"`},
		"digit first":   {"a provider id begins with it", Driver{"3com", module}, `name "3com"`},
		"dash last":     {"it is no DNS label", Driver{"acme-", module}, `name "acme-"`},
		"dot":           {"it would be two tokens of a subject", Driver{"acme.com", module}, `name "acme.com"`},
		"too long":      {"the Deployment's name has it", Driver{strings.Repeat("a", maxName+1), module}, "at most 50"},
		"module":        {"it stands in import lines", Driver{"acme", `example.com/"x`}, "module"},
		"module folder": {"a path is not relative", Driver{"acme", "./driver"}, "module"},
		"module parent": {"a path has no dots alone", Driver{"acme", "example.com/../driver"}, "module"},
		"module slash":  {"a path does not end with it", Driver{"acme", "example.com/driver/"}, "module"},
		"net/http":      {"it is Go's own", Driver{"acme", "net/http"}, "module"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := tc.driver.Validate()
			if (err == nil) != (tc.says == "") || err != nil && !strings.Contains(err.Error(), tc.says) {
				t.Errorf("%s: want %q in the error, have %v", tc.reason, tc.says, err)
			}
		})
	}
}

// A driver is a user in NATS, of which each has another name.
func TestDriver_Validate_Users(t *testing.T) {
	t.Parallel()
	var named []string
	conf := read(t, filepath.Join(tree, "deploy", "kustomize", "mcm-embedded-nats", "nats.conf"))
	for _, match := range regexp.MustCompile(`user: (\w+)`).FindAllStringSubmatch(conf, -1) {
		named = append(named, match[1])
		err := Driver{match[1], "example.com/driver"}.Validate()
		if err == nil || !strings.Contains(err.Error(), "has a user of that name") {
			t.Errorf("name %s was taken: %v", match[1], err)
		}
	}
	if len(named) < len(users) {
		t.Errorf("nats.conf has users %q, and these are refused: %q", named, users)
	}
}

// Credentials are in no commit, whatever the author adds.
func TestDriver_Write_Credentials(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	run(t, dir, "git", "init", "--quiet") // a folder that has only a repository is as good as an empty one
	if err := (Driver{"acme", "example.com/driver-acme"}).Write(dir); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "secret.local.yaml"), "apiToken: real")
	run(t, dir, "git", "add", "--all")
	added := strings.Fields(run(t, dir, "git", "ls-files"))
	if !slices.Contains(added, "example/1-secret.yaml") || slices.Contains(added, "secret.local.yaml") {
		t.Errorf("want the example and not the credentials in git: %q", added)
	}
	if ignored := strings.Fields(read(t, filepath.Join(dir, ".dockerignore"))); !slices.Contains(ignored, "*.local.yaml") {
		t.Errorf("an image build takes the credentials: it leaves out %q", ignored)
	}
	if readme := read(t, filepath.Join(dir, "README.md")); !strings.Contains(readme, "cp example/1-secret.yaml secret.local.yaml\n") {
		t.Error("the README.md has the credentials written elsewhere")
	}
}

// Nothing is overwritten, and nothing written in part.
func TestDriver_Write_Refused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "mine.txt"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	err := Driver{"acme", "example.com/driver-acme"}.Write(dir)
	entries, readErr := os.ReadDir(dir)
	if err == nil || !strings.Contains(err.Error(), "mine.txt") || readErr != nil || len(entries) != 1 {
		t.Errorf("want an error that names the file that is there, and nothing else: %v, %v, %v", err, entries, readErr)
	}
	missing := filepath.Join(dir, "a", "b")
	if err := (Driver{"No", "example.com/driver-acme"}).Write(missing); err == nil {
		t.Error("a name that is no provider's was taken")
	}
	if _, err := os.Stat(missing); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a folder was made for a driver that was refused: %v", err)
	}
}

// TestDriver does what an author does: writes a driver outside of this tree, builds it and runs its tests. Then the program
// passes as a process that has only the permissions of its user in NATS.
func TestDriver(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "driver-my-cloud")
	if err := (Driver{"my-cloud", "example.com/driver-my-cloud"}).Write(dir); err != nil {
		t.Fatal(err)
	}
	wantFormatted(t, dir)
	edit := []string{"go", "mod", "edit"}
	for _, module := range []string{"proto", "bus", "driversdk"} { // no release is needed
		edit = append(edit, "-replace="+path+"/"+module+"="+absolute(t, filepath.Join(tree, module)))
	}
	run(t, dir, edit...)
	before := goVersion(t, dir)
	run(t, dir, "go", "mod", "tidy")
	if after, dockerfile := goVersion(t, dir), read(t, filepath.Join(dir, "Dockerfile")); after != before || !strings.Contains(dockerfile, "FROM golang:"+after) {
		t.Errorf("this tree needs Go %s, and the new driver has go %s and this Dockerfile:\n%s", after, before, dockerfile)
	}
	run(t, dir, "go", "vet", "./...")
	run(t, dir, "go", "build", "-trimpath", "-o", "driver-my-cloud", ".") // as the Dockerfile does
	t.Run("tests", func(t *testing.T) {
		t.Parallel()
		run(t, dir, "go", "test", "-count=1", "./...")
	})
	t.Run("process", func(t *testing.T) {
		t.Parallel()
		conforms(t, dir)
	})
}

// goVersion returns the minor version of Go that a module needs, such as 1.26.
func goVersion(t *testing.T, dir string) string {
	t.Helper()
	var mod struct {
		Go string `json:"Go"`
	}
	if err := json.Unmarshal([]byte(run(t, dir, "go", "mod", "edit", "-json")), &mod); err != nil {
		t.Fatal(err)
	}

	return mod.Go[:strings.LastIndex(mod.Go, ".")]
}

// wantFormatted wants the code as gofmt leaves it.
func wantFormatted(t *testing.T, dir string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(file string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(file) != ".go" {
			return err
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		formatted, err := format.Source(text)
		if err == nil && !bytes.Equal(text, formatted) {
			t.Errorf("%s is not as gofmt leaves it", file)
		}

		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// conforms has driver-conformance check the program, on a NATS server with the driver's user.
func conforms(t *testing.T, dir string) {
	t.Helper()
	programs := t.TempDir()
	checker, fake := filepath.Join(programs, "driver-conformance"), filepath.Join(programs, "fake")
	run(t, tree, "go", "build", "-o", checker, "./cmd/driver-conformance")
	run(t, dir, "go", "build", "-o", fake, "./fakecloud/serve")

	const managersPassword, driversPassword = "password-of-mcm", "password-of-the-driver"
	conf := filepath.Join(programs, "nats.conf")
	write(t, conf, fmt.Sprintf("MY_CLOUD_PASSWORD: %q\nauthorization { users: [\n{user: mcm, password: %q}\n%s] }\n",
		driversPassword, managersPassword, read(t, filepath.Join(dir, "deploy", "nats-user.conf"))))
	srv := bustest.Server(t, embedded.Options{ConfigFile: conf})
	as := func(user, password string) string {
		return strings.Replace(srv.URL(), "nats://", "nats://"+user+":"+password+"@", 1)
	}

	secret, log := filepath.Join(programs, "secret.yaml"), filepath.Join(programs, "driver.log")
	write(t, secret, strings.Replace(read(t, filepath.Join(dir, "example", "1-secret.yaml")), "put-yours-here", "token-of-the-fake-cloud", 1))
	out := run(t, dir, checker, "--class", "example/2-machineclass.yaml", "--secret", secret, "--nats-url", as("mcm", managersPassword),
		"--bootstrap", "<<BOOTSTRAP_TOKEN>>=abcdef.0123456789abcdef", "--driver-log", log,
		"--", "./driver-my-cloud", "--nats-url", as("my-cloud", driversPassword), "--cloud-url", startFake(t, fake), "--drain-timeout=5s")
	if !strings.Contains(out, " 0 failed") {
		t.Errorf("the driver breaks the contract:\n%s", out)
	}
	if text := strings.ToLower(read(t, log)); !strings.Contains(text, "connected to nats") || strings.Contains(text, "violation") {
		t.Errorf("want a log of a driver that lacks no permission:\n%s", text)
	}
}

// startFake runs the fake cloud until the test ends, and returns its URL.
func startFake(t *testing.T, program string) (url string) {
	t.Helper()
	cmd := command(t, "", program, "--listen=127.0.0.1:0")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cmd.Process.Kill(); err != nil {
			t.Errorf("the fake cloud has not run until the end: %v", err)
		}
		_ = cmd.Wait() // it was killed
	})
	if url, err = bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("the fake cloud says no URL: %v", err)
	}

	return strings.TrimSpace(url)
}

// run runs a command to its end, and returns what it prints.
func run(t *testing.T, dir string, args ...string) string {
	t.Helper()
	out, err := command(t, dir, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args[:min(len(args), 3)], " "), err, out)
	}

	return string(out)
}

func command(t *testing.T, dir string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), limit)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	// Of modules that no go.sum names yet, those in the module cache count: no server is asked.
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOWORK=off", "GONOSUMDB=*", "CGO_ENABLED=0")

	return cmd
}

func absolute(t *testing.T, dir string) string {
	t.Helper()
	abs, err := filepath.Abs(dir)
	if err != nil {
		t.Fatal(err)
	}

	return abs
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}

	return string(text)
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
