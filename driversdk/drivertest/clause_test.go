package drivertest

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The contract and the suite know the same clauses, and PROTOCOL.md cites them.
func TestClauses(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../proto/machinebus/driver/v1/*.proto")
	if err != nil || len(files) == 0 {
		t.Fatalf("the contract's files: %v, %v", files, err)
	}
	id := regexp.MustCompile(`\[([A-Z]+-\d+)\]`)
	contract := map[string]bool{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, found := range id.FindAllSubmatch(text, -1) {
			contract[string(found[1])] = true
		}
	}
	protocol, err := os.ReadFile("../../PROTOCOL.md")
	if err != nil {
		t.Fatal(err)
	}
	for found := range contract {
		if !strings.Contains(string(protocol), "["+found+"]") {
			t.Errorf("PROTOCOL.md does not say where clause %s belongs", found)
		}
	}
	want := slices.SortedFunc(maps.Keys(contract), compareIDs)
	var have []string
	for _, c := range Clauses() {
		have = append(have, c.ID)
		if c.Says == "" {
			t.Errorf("clause %s: nothing is said of it", c.ID)
		}
		if c.Manager != (c.check == nil) || c.Manager != (c.binds == manager) {
			t.Errorf("clause %s: want a check, or that it binds the manager", c.ID)
		}
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("clauses of the contract (-) and of the suite (+):\n%s", diff)
	}
}
