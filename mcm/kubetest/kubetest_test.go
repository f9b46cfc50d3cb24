package kubetest

import (
	"bytes"
	"errors"
	"flag"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// tests are those of some package.
type tests func() int

func (f tests) Run() int { return f() }

// answers reports whether the API server returns its version, for which no permission is needed.
func answers(cfg *rest.Config) error {
	transport, err := rest.TransportFor(cfg)
	if err != nil {
		return err
	}
	c := &http.Client{Transport: transport}
	defer c.CloseIdleConnections()
	res, err := c.Get(cfg.Host + "/version")
	if err != nil {
		return err
	}

	return res.Body.Close()
}

// TestRun_Life has tests fail with a code of their own; what they see is a working
// API server, and nothing is left of it.
func TestRun_Life(t *testing.T) {
	var cfg *rest.Config
	var steps []string
	failing := tests(func() int {
		steps = append(steps, "tests")
		if err := answers(cfg); err != nil {
			t.Error("during the tests:", err)
		}
		checkObjects(t, cfg)

		return 3
	})
	ready := func(c *rest.Config) error {
		cfg = c
		steps = append(steps, "ready")

		return Create(c, "deploy/kustomize/target-cluster/nodes.yaml")
	}
	done := func() error {
		steps = append(steps, "done")
		if err := answers(cfg); err != nil {
			t.Error("done while the API server is there:", err)
		}

		return errors.New("done is broken")
	}
	var log bytes.Buffer
	if code := run(&log, failing, Environment(), ready, done); code != 3 {
		t.Errorf("exit code %d, want that of the tests", code)
	}
	if diff := cmp.Diff([]string{"ready", "tests", "done"}, steps); diff != "" {
		t.Error(diff)
	}
	if !strings.Contains(log.String(), "done is broken") {
		t.Errorf("what went wrong afterwards must be said, got: %s", log.String())
	}
	if err := answers(cfg); err == nil {
		t.Error("the API server is still there")
	}
}

// checkObjects checks what is made from the way to an API server.
func checkObjects(t *testing.T, cfg *rest.Config) {
	t.Helper()
	c, one := Namespace(t, cfg)
	if err := c.List(t.Context(), &v1alpha1.MachineList{}, client.InNamespace(one)); err != nil {
		t.Error("the project's kinds:", err)
	}
	if _, other := Namespace(t, cfg); one == other {
		t.Errorf("two namespaces %s", one)
	}
	mcm, err := client.New(AsMCM(cfg), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := mcm.List(t.Context(), &corev1.NodeList{}); err != nil {
		t.Error("what the manifest grants:", err)
	}
	if err := mcm.List(t.Context(), &corev1.SecretList{}); !apierrors.IsForbidden(err) {
		t.Error("what it does not grant must be refused, got:", err)
	}
}

func TestRun_Refused(t *testing.T) {
	cases := map[string]struct {
		assets string // instead of the real ones, when set to - for none
		env    *envtest.Environment
		ready  error
		want   string
	}{
		"no assets":    {assets: "-", env: Environment(), want: "`make test` sets it"},
		"wrong assets": {assets: "/nonexistent", env: Environment(), want: "start an API server: "},
		"wrong CRDs": {
			env:  &envtest.Environment{CRDDirectoryPaths: []string{File("deploy/none")}, ErrorIfCRDPathMissing: true},
			want: "deploy/none",
		},
		"not ready": {env: &envtest.Environment{}, ready: errors.New("no rights"), want: "prepare the tests: no rights"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if tc.assets != "" {
				t.Setenv("KUBEBUILDER_ASSETS", strings.TrimPrefix(tc.assets, "-"))
				t.Setenv("TMPDIR", t.TempDir()) // a start that fails leaves a directory behind
			}
			var log bytes.Buffer
			never := tests(func() int {
				t.Error("the tests run all the same")

				return 0
			})
			code := run(&log, never, tc.env, func(*rest.Config) error { return tc.ready })
			if code != 1 || !strings.Contains(log.String(), tc.want) {
				t.Errorf("exit code %d; want 1 and %q in: %s", code, tc.want, log.String())
			}
			if cfg := tc.env.Config; cfg != nil && answers(cfg) == nil {
				t.Error("the API server is still there")
			}
		})
	}
}

func TestRun_BrokenEnd(t *testing.T) {
	fine := tests(func() int { return 0 })
	done := func() error { return errors.New("done is broken") }
	if code := run(io.Discard, fine, &envtest.Environment{}, func(*rest.Config) error { return nil }, done); code != 1 {
		t.Errorf("tests that pass do not cover up for the rest: exit code %d, want 1", code)
	}
}

// TestRun_Fuzzing sets what go test -fuzz sets: the test binary's own flags.
func TestRun_Fuzzing(t *testing.T) {
	for name, value := range map[string]string{"test.fuzz": "FuzzSome", "test.fuzzworker": "true"} {
		t.Run(name, func(t *testing.T) {
			f := flag.Lookup(name)
			before := f.Value.String()
			if err := f.Value.Set(value); err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := f.Value.Set(before); err != nil {
					t.Error(err)
				}
			}()
			env := &envtest.Environment{}
			started := func(*rest.Config) error { return errors.New("there is an API server") }
			if code := run(t.Output(), tests(func() int { return 7 }), env, started); code != 7 || env.Config != nil {
				t.Errorf("exit code %d, want 7 of the tests; API server %v, want none", code, env.Config)
			}
		})
	}
}

func TestFile(t *testing.T) {
	want := File("deploy/crds")
	t.Chdir("..")
	if got := File("deploy/crds"); got != want {
		t.Errorf("from another directory %s, want %s", got, want)
	}
	t.Chdir("/")
	if got := File("deploy/crds"); got != "deploy/crds" {
		t.Errorf("outside of the repository %s", got)
	}
}
