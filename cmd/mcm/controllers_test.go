package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestSelected(t *testing.T) {
	t.Parallel()
	all := controllerNames()
	without := func(name string) (rest []string) {
		for _, c := range all {
			if c != name {
				rest = append(rest, c)
			}
		}

		return rest
	}
	cases := map[string]struct {
		reason string
		list   []string
		want   []string
	}{
		"all":            {"the default", []string{"*"}, all},
		"none":           {"nothing is named", nil, nil},
		"all but one":    {"sets above another machine controller", []string{"*", "-machine"}, without("machine")},
		"in any order":   {"the star need not be first", []string{"-machine", "*"}, without("machine")},
		"one":            {"only what is named", []string{"machineset"}, []string{"machineset"}},
		"only a minus":   {"nothing is named that would run", []string{"-machine"}, nil},
		"twice":          {"what names it first decides", []string{"-freeze", "freeze", "*"}, without("freeze")},
		"one and a star": {"the star is more", []string{"freeze", "*"}, all},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var got []string
			for _, c := range all {
				if selected(tc.list, c) {
					got = append(got, c)
				}
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("controllers of %v (-want +got):\n%s%s", tc.list, diff, tc.reason)
			}
		})
	}
}

func TestControllersFlag(t *testing.T) {
	t.Parallel()
	for list, want := range map[string]string{
		"*,-machine": "", "machineset,freeze": "", "": "",
		"*,-machines": `unknown controller "machines"`, "orchestra": "machineset", "**": "unknown controller", "-*": "unknown controller",
	} {
		cmd := newCommand()
		if err := cmd.ParseFlags([]string{"--controllers=" + list}); err != nil {
			t.Fatal(err)
		}
		value, err := cmd.Flags().GetStringSlice("controllers")
		if err != nil {
			t.Fatal(err)
		}
		err = validateControllers(value)
		if (err != nil) != (want != "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("--controllers=%s: error is %v, want one with %q", list, err, want)
		}
	}
	if usage := newCommand().Flags().Lookup("controllers").Usage; !strings.Contains(usage, strings.Join(controllerNames(), ", ")) {
		t.Errorf("the flag's help does not list the controllers: %s", usage)
	}
}
