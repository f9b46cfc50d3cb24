package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

func TestState(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "state.json")
	none, err := readState(path)
	if err != nil || len(none.alive()) > 0 || none.remove() != nil {
		t.Fatalf("without a file: %+v, %v", none, err)
	}
	want := &state{path: path, Processes: []stack.Recorded{{Name: "mcm", PID: 1, Started: 1, Boot: "another", Log: "mcm.log"}}}
	if err := want.setCluster(cluster{Kubeconfig: "k", Namespace: "n", Foreign: true, CRDs: []string{"c"}}); err != nil {
		t.Fatal(err)
	}
	got, err := readState(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreUnexported(state{})); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if len(got.alive()) > 0 {
		t.Error("a process of another boot counts as alive")
	}
	if err := os.WriteFile(path, []byte(`{"processes": [`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readState(path); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("readState() = %v of a damaged file, want its name", err)
	}
}
