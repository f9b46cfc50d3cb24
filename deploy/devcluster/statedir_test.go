package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestOpenStateDir(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "new", "cluster")
	d := mustOpen(t, path, false)
	files := []string{d.kubeconfig("mcm"), d.kubeconfig(adminUser), d.log("etcd"), d.internal("data")}
	for _, f := range append(files, filepath.Join(path, "notes.txt")) {
		if err := os.WriteFile(f, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	_, err := openStateDir(path, true)
	checkError(t, "two clusters cannot share a directory", err, "in use by process")
	if err := d.close(); err != nil {
		t.Fatal(err)
	}

	if err := mustOpen(t, path, true).close(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(files, existing(files)); diff != "" {
		t.Errorf("keep must keep: -want, +got:\n%s", diff)
	}

	if err := mustOpen(t, path, false).close(); err != nil {
		t.Fatal(err)
	}
	if left := existing(files); len(left) > 0 {
		t.Errorf("not wiped: %q", left)
	}
	if len(existing([]string{filepath.Join(path, "notes.txt")})) == 0 {
		t.Errorf("a file that no cluster writes was wiped")
	}
}

func TestOpenStateDirRefusesForeign(t *testing.T) {
	t.Parallel()
	path := t.TempDir()
	precious := filepath.Join(path, "kubeconfig")
	if err := os.WriteFile(precious, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := openStateDir(path, false)
	checkError(t, "it must not delete other directories", err, "was not created by devcluster")
	if len(existing([]string{precious})) == 0 {
		t.Error("wiped in spite of the refusal")
	}
}

func mustOpen(t *testing.T, path string, keep bool) *stateDir {
	t.Helper()
	d, err := openStateDir(path, keep)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func existing(paths []string) []string {
	var found []string
	for _, p := range paths {
		if _, err := os.Stat(p); err == nil {
			found = append(found, p)
		}
	}
	return found
}
