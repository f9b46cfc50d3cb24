package main

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestPKI(t *testing.T) {
	t.Parallel()
	p := newPKI(filepath.Join(t.TempDir(), "pki"))
	now := time.Now()
	if err := p.ensure(now); err != nil {
		t.Fatal(err)
	}
	caCert := read(t, p.caCert)
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(caCert) {
		t.Fatalf("no certificate in %s", p.caCert)
	}
	server, err := tls.LoadX509KeyPair(p.serverCert, p.serverKey)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{loopback, serviceIP, "localhost", "kubernetes.default.svc"} {
		if _, err := server.Leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: roots, CurrentTime: now}); err != nil {
			t.Errorf("a client that dials %s: %v", name, err)
		}
	}
	if err := p.ensure(now.Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(caCert), string(read(t, p.caCert))); diff != "" {
		t.Errorf("a kept cluster must keep its CA: -first, +second:\n%s", diff)
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return content
}
