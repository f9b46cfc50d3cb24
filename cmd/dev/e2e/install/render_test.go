package install

import (
	"bytes"
	"context"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

const deployDir = "../../../../deploy"

// kustomizations returns the folders of deploy/ that kustomize can build.
func kustomizations(t *testing.T) []string {
	t.Helper()
	var found []string
	err := filepath.WalkDir(deployDir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && strings.EqualFold(strings.TrimSuffix(d.Name(), ".yaml"), "kustomization") {
			found = append(found, filepath.Dir(path))
		}

		return err
	})
	if err != nil {
		t.Fatal(err)
	}

	return found
}

// kubectl runs the dev cluster's kubectl as its admin.
func kubectl(t *testing.T, stdin []byte, args ...string) ([]byte, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	args = append([]string{"kubectl", "--kubeconfig", shared.cluster.Kubeconfig}, args...)
	cmd := exec.CommandContext(ctx, filepath.Join(shared.bin, "devcluster"), args...)
	cmd.Stdin = bytes.NewReader(stdin)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir()}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.Output()
	if stderr.Len() > 0 {
		t.Logf("kubectl %s: %s", strings.Join(args[3:], " "), stderr.String())
	}

	return stdout, err
}

// build returns what kustomize makes of a folder below deploy/.
func build(t *testing.T, dir string) []byte {
	t.Helper()
	text, err := kubectl(t, nil, "kustomize", dir)
	if err != nil {
		t.Fatalf("kustomize %s: %v", dir, err)
	}

	return text
}

// objects returns the objects that kustomize makes of a folder below deploy/.
func objects(t *testing.T, dir string) []*unstructured.Unstructured {
	t.Helper()
	file := filepath.Join(t.TempDir(), "objects.yaml")
	if err := os.WriteFile(file, build(t, filepath.Join(deployDir, dir)), 0o600); err != nil {
		t.Fatal(err)
	}
	list, err := stack.LoadYAML(file)
	if err != nil {
		t.Fatal(err)
	}

	return list
}

// typed converts the one object of a kind and name; it fails where there is none.
func typed[T any](t *testing.T, list []*unstructured.Unstructured, kind, name string) *T {
	t.Helper()
	i := slices.IndexFunc(list, func(o *unstructured.Unstructured) bool { return o.GetKind() == kind && o.GetName() == name })
	if i < 0 {
		t.Fatalf("there is no %s %s", kind, name)
	}
	into := new(T)
	if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(list[i].Object, into, true); err != nil {
		t.Fatalf("%s %s: %v", kind, name, err)
	}

	return into
}
