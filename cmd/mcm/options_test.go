package main

import (
	"net"
	"strconv"
	"strings"
	"testing"
)

func TestProbePort(t *testing.T) {
	t.Parallel()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, text, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	port, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	cases := map[string]struct {
		reason, address, want string
	}{
		"taken":           {"before anything else is started", "127.0.0.1", "choose another --port"},
		"taken elsewhere": {"all addresses include the one that is taken", "0.0.0.0", "choose another --port"},
		"no such address": {"192.0.2.0/24 is for documentation, no host has it", "192.0.2.1", "--address"},
	}
	for name, tc := range cases {
		o := &options{address: tc.address, port: port}
		if err := o.probePort(t.Context()); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error is %v, want one with %q: %s", name, err, tc.want, tc.reason)
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	o := &options{address: "127.0.0.1", port: port}
	for range 2 { // it must not keep the port itself
		if err := o.probePort(t.Context()); err != nil {
			t.Error("free port:", err)
		}
	}
}

func TestScope(t *testing.T) {
	t.Parallel()
	if got := (&options{namespace: "shop"}).scope(); got != "shop" {
		t.Errorf("scope = %q, want the namespace", got)
	}
	if got := (&options{namespace: "shop", allNamespaces: true}).scope(); got != "" {
		t.Errorf("scope = %q, want none: --namespace only holds the lease", got)
	}
}

func TestSafeguardFlags(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		reason, want string
		args         []string
	}{
		"no replacements": {
			"nothing would ever be replaced, without a word", "--machine-max-replacements must be at least 1, not 0",
			[]string{"--machine-max-replacements=0"},
		},
		"no timeout": {
			"every slow answer would freeze machines", "--machine-safety-apiserver-statuscheck-timeout must be positive, not -1s",
			[]string{"--machine-safety-apiserver-statuscheck-timeout=-1s"},
		},
		"rare looks": {
			"as in the machine controller manager", "--machine-safety-apiserver-statuscheck-period must not be less than the timeout: 1m0s and 2m0s",
			[]string{"--machine-safety-apiserver-statuscheck-timeout=2m"},
		},
	} {
		cmd := newCommand()
		cmd.SetArgs(row.args)
		if err := cmd.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), row.want) {
			t.Errorf("%s: error is %v, want one with %q: %s", name, err, row.want, row.reason)
		}
	}
}
