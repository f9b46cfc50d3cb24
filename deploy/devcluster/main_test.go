package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestDispatch(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason   string
		args     []string
		wantArgs []string
		wantOK   bool
	}{
		"Symlink":   {reason: "called by a part's name", args: []string{"/a/kubectl", "get"}, wantArgs: []string{"/a/kubectl", "get"}, wantOK: true},
		"FirstArg":  {reason: "the part sees its own name first", args: []string{"devcluster", "etcd", "-h"}, wantArgs: []string{"etcd", "-h"}, wantOK: true},
		"Own":       {reason: "our own commands are no parts", args: []string{"devcluster", "run"}},
		"LaterArg":  {reason: "only the first argument chooses", args: []string{"devcluster", "run", "etcd"}},
		"NoArg":     {reason: "help is ours", args: []string{"devcluster"}},
		"NoArgv0":   {reason: "execve allows it", args: nil},
		"Symlinked": {reason: "the program name wins over an argument", args: []string{"kubectl", "etcd"}, wantArgs: []string{"kubectl", "etcd"}, wantOK: true},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			part, got, ok := dispatch(tc.args)
			if ok != tc.wantOK || (part != nil) != tc.wantOK {
				t.Fatalf("%s\ndispatch(%q): ok %t, part %t; want %t", tc.reason, tc.args, ok, part != nil, tc.wantOK)
			}
			if diff := cmp.Diff(tc.wantArgs, got); diff != "" {
				t.Errorf("%s\n-want, +got:\n%s", tc.reason, diff)
			}
		})
	}
}

func TestMakesServiceAccounts(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		controllers []string
		want        bool
	}{
		"Default":  {controllers: defaultControllers, want: true},
		"All":      {controllers: []string{"*"}, want: true},
		"Alias":    {controllers: []string{"serviceaccount"}, want: true},
		"Switched": {controllers: []string{"*", "-serviceaccount-controller"}},
		"Others":   {controllers: []string{"namespace", "serviceaccount-token"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := makesServiceAccounts(tc.controllers); got != tc.want {
				t.Errorf("makesServiceAccounts(%q) = %t, want %t", tc.controllers, got, tc.want)
			}
		})
	}
}

func TestCheckControllers(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason      string
		controllers []string
		wantErr     string
	}{
		"Default": {reason: "ours must exist in the version linked", controllers: defaultControllers},
		"Forms":   {reason: "kube-controller-manager takes these forms", controllers: []string{"*", "-namespace", "csrsigning"}},
		"Unknown": {reason: "a typo is reported before anything starts", controllers: []string{"namespaces"}, wantErr: `"namespaces" is unknown`},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			checkError(t, tc.reason, checkControllers(tc.controllers), tc.wantErr)
		})
	}
}

func TestFailedChecks(t *testing.T) {
	t.Parallel()
	report := "[+]ping ok\n[-]poststarthook/a failed: reason withheld\n[-]b failed\nreadyz check failed"
	if diff := cmp.Diff("poststarthook/a failed: reason withheld, b failed", failedChecks(report)); diff != "" {
		t.Errorf("-want, +got:\n%s", diff)
	}
}

func TestReport(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "x.log")
	var content []byte
	for line := range 20 {
		content = append(content, 'a'+byte(line), '\n')
	}
	if err := os.WriteFile(path, append(content, "no newline"...), 0o600); err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	report(&got, &componentError{component: "etcd", log: path, err: errors.New("broken")})
	want := "devcluster: etcd: broken\nlast lines of " + path + ":\n" +
		"g\nh\ni\nj\nk\nl\nm\nn\no\np\nq\nr\ns\nt\nno newline\n"
	if diff := cmp.Diff(want, got.String()); diff != "" {
		t.Errorf("-want, +got:\n%s", diff)
	}
}

func TestLinkAssets(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "assets")
	for _, self := range []string{"/old", "/new"} {
		if err := linkAssets(dir, self); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"etcd", "kube-apiserver", "kubectl"} {
		target, err := os.Readlink(filepath.Join(dir, name))
		if err != nil || target != "/new" {
			t.Errorf("%s -> %q, %v; want /new", name, target, err)
		}
	}
	file := filepath.Join(t.TempDir(), "etcd")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	checkError(t, "a real etcd must not be replaced", linkAssets(filepath.Dir(file), "/new"), "is not a symlink")
}
