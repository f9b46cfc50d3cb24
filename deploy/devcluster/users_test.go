package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseUsers(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason  string
		values  []string
		want    []user
		wantErr string
	}{
		"None":        {reason: "no flag, no user"},
		"NameOnly":    {reason: "groups are optional", values: []string{"mcm"}, want: []user{{name: "mcm"}}},
		"EmptyGroups": {reason: "a trailing colon names no group", values: []string{"mcm:"}, want: []user{{name: "mcm"}}},
		"Groups": {
			reason: "only the first colon separates: groups such as system:nodes hold colons",
			values: []string{"a:ops,system:nodes", "b.c-1:x"},
			want:   []user{{name: "a", groups: []string{"ops", "system:nodes"}}, {name: "b.c-1", groups: []string{"x"}}},
		},
		"NoName":     {reason: "a name is needed", values: []string{":ops"}, wantErr: "is not a name"},
		"Path":       {reason: "the name becomes a file name", values: []string{"../x"}, wantErr: "is not a name"},
		"EmptyGroup": {reason: "the API server would take it for a group", values: []string{"a:x,,y"}, wantErr: "a group is empty"},
		"Admin":      {reason: "the admin is there already", values: []string{"admin"}, wantErr: "already a user"},
		"Twice":      {reason: "one name, one token", values: []string{"a", "a:x"}, wantErr: "already a user"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := parseUsers(tc.values)
			checkError(t, tc.reason, err, tc.wantErr)
			if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(user{})); diff != "" {
				t.Errorf("%s\nparseUsers(%q): -want, +got:\n%s", tc.reason, tc.values, diff)
			}
		})
	}
}

func TestAssignTokens(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "tokens.csv")
	first := []user{{name: "a", groups: []string{"x", "y"}}, {name: "b"}}
	if err := assignTokens(path, first); err != nil {
		t.Fatal(err)
	}
	if first[0].token == "" || first[0].token == first[1].token {
		t.Fatalf("tokens %q and %q: want two different ones", first[0].token, first[1].token)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	want := first[0].token + ",a,a,\"x,y\"\n" + first[1].token + ",b,b\n"
	if diff := cmp.Diff(want, string(content)); diff != "" {
		t.Errorf("token file: -want, +got:\n%s", diff)
	}

	second := []user{{name: "b"}, {name: "c"}}
	if err := assignTokens(path, second); err != nil {
		t.Fatal(err)
	}
	if second[0].token != first[1].token {
		t.Errorf("b's token changed: the kubeconfigs of a kept cluster would be refused")
	}
	tokens, err := readTokens(path)
	if err != nil {
		t.Fatal(err)
	}
	wantTokens := map[string]string{"b": second[0].token, "c": second[1].token}
	if diff := cmp.Diff(wantTokens, tokens); diff != "" {
		t.Errorf("a user that was not asked for again must go: -want, +got:\n%s", diff)
	}
}

// checkError fails unless err holds want, or both are empty.
func checkError(t *testing.T, reason string, err error, want string) {
	t.Helper()
	switch {
	case err == nil && want != "":
		t.Errorf("%s\nwant an error with %q", reason, want)
	case err != nil && (want == "" || !strings.Contains(err.Error(), want)):
		t.Errorf("%s\nwant an error with %q, got: %v", reason, want, err)
	}
}
