package main

import (
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

// TestUnfenced has `make faults-unfenced` pass for the exit status of damage alone.
func TestUnfenced(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		exits  int
		pass   bool
		prints string
	}{
		"damage":   {status(errDamaged), true, "damage was found"},
		"well":     {0, false, "no damage was found"},
		"unproved": {status(errUnbroken), false, "nothing was proved"},
		"killed":   {137, false, "nothing was proved"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, err := exec.CommandContext(t.Context(), "../../../.tools/damage.sh", "sh", "-c", "exit "+strconv.Itoa(tc.exits)).CombinedOutput()
			if (err == nil) != tc.pass || !strings.Contains(string(out), tc.prints) || !strings.Contains(string(out), strconv.Itoa(tc.exits)) {
				t.Errorf("exit status %d: %v, want it to pass: %v, and to print %q:\n%s", tc.exits, err, tc.pass, tc.prints, out)
			}
		})
	}
}
