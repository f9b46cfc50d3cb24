package v1alpha1

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

func TestShortText(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason, text, want string
	}{
		"short":        {"it is as it was", "no capacity", "no capacity"},
		"at the limit": {"nothing has to go", strings.Repeat("ü", 500), strings.Repeat("ü", 500)},
		"beyond": {
			"what identifies it stands at either end; characters stay whole",
			strings.Repeat("ä", 350) + "xy" + strings.Repeat("ö", 150), strings.Repeat("ä", 350) + "…" + strings.Repeat("ö", 150),
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := ShortText(tc.text); got != tc.want {
				t.Errorf("%s: got %q", tc.reason, got)
			}
		})
	}
}

// A status must fit into etcd whatever clouds have answered.
func TestFirstFailedMachinesFitIntoAnObject(t *testing.T) {
	t.Parallel()
	var all []MachineSummary
	for i := range 1000 {
		all = append(all, MachineSummary{
			Name: fmt.Sprintf("m%04d", i), ProviderID: strings.Repeat("p", 100),
			LastOperation: LastOperation{Description: strings.Repeat("€", 5000)},
		})
	}
	got := FirstFailedMachines(all)
	if len(got) != MostFailedMachines || got[0].Name != "m0000" || got[99].Name != "m0099" {
		t.Errorf("%d machines from %s to %s", len(got), got[0].Name, got[len(got)-1].Name)
	}
	text, err := json.Marshal(got)
	if err != nil {
		t.Fatal(err)
	}
	if most := 300_000; len(text) > most {
		t.Errorf("they take %d bytes, want no more than %d", len(text), most)
	}
}
