package main

import (
	"flag"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files of this package afresh")

func TestHelp(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"mcmctl", "drivers", "ops", "sub", "decode", "migrate", "new driver", "rollout"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			args := append(strings.Fields(name), "--help")
			if name == "mcmctl" {
				args = []string{} // help is what it does without a command
			}
			got, _, err := mcmctl(t, args...)
			if err != nil {
				t.Fatalf("mcmctl %v: %v", args, err)
			}
			file := "testdata/" + strings.ReplaceAll(name, " ", "-") + ".help"
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("help changed; if for the better, run this test with -update\n-want, +got:\n%s", diff)
			}
		})
	}
}

func TestVersion(t *testing.T) {
	t.Parallel()
	for _, arg := range []string{"version", "--version"} {
		out, _, err := mcmctl(t, arg)
		if err != nil || !strings.HasPrefix(out, "mcmctl ") || !strings.Contains(out, " go1.") {
			t.Errorf("mcmctl %s: got %q, %v", arg, out, err)
		}
	}
}

func TestCompletion(t *testing.T) {
	t.Parallel()
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		out, _, err := mcmctl(t, "completion", shell)
		if err != nil || !strings.Contains(out, "mcmctl") {
			t.Errorf("mcmctl completion %s: got %d bytes, %v", shell, len(out), err)
		}
	}
	if out, _, err := mcmctl(t, "completion", "nosuch"); err == nil || !strings.Contains(err.Error(), `unknown shell "nosuch"`) {
		t.Errorf("mcmctl completion nosuch: got %q, %v; want an error that names the shell", out, err)
	}
	cases := map[string]struct {
		reason string
		args   []string
		want   string
	}{
		"Shell":  {"shells complete", []string{"completion", ""}, "bash\nfish\npowershell\nzsh\n"},
		"Format": {"formats complete", []string{"drivers", "-o", ""}, "table\nwide\njson\n:4\n"},
		"Tree":   {"sub offers the trees", []string{"sub", "aud"}, "audit.>"},
		"Groups": {"also that of node groups", []string{"sub", "node"}, "nodegroup.>"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, _, err := mcmctl(t, append([]string{"__complete"}, tc.args...)...)
			if err != nil || !strings.Contains(out, tc.want) {
				t.Errorf("%s: want %q, got %q, %v", tc.reason, tc.want, out, err)
			}
		})
	}
}

func TestPrintTable(t *testing.T) {
	t.Parallel()
	var out output
	rows := [][]string{{"booting\x1b[2J\nnow", ""}, {"\u202egnp.exe\ttab", "größer"}}
	if err := printTable(&out, []string{"A", "B"}, rows); err != nil {
		t.Fatal(err)
	}
	want := "A                 B\nbooting [2J now   -\n gnp.exe tab      größer\n"
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("text from the bus neither moves the cursor nor breaks the table: -want, +got:\n%s", diff)
	}
}

func TestAge(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		-time.Second: "0.0s", 1234 * time.Millisecond: "1.2s", 75 * time.Second: "75s", 61 * time.Minute: "61m",
		30 * time.Hour: "30h", 50 * time.Hour: "2d",
	} {
		if got := age(d); got != want {
			t.Errorf("age(%s): want %s, got %s", d, want, got)
		}
	}
}
