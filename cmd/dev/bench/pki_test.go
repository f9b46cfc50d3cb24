package main

import (
	"crypto/tls"
	"testing"
)

// A client and a server that have the files trust each other, and a client without
// does not get in.
func TestPKI(t *testing.T) {
	t.Parallel()
	p, err := writePKI(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	known, err := p.client()
	if err != nil {
		t.Fatal(err)
	}
	listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: known.Certificates, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: known.RootCAs,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	served := make(chan error, 1)
	for name, tc := range map[string]struct {
		config *tls.Config
		in     bool
	}{
		"with a certificate": {known, true},
		"without":            {&tls.Config{MinVersion: tls.VersionTLS13, RootCAs: known.RootCAs}, false},
	} {
		go func() {
			conn, err := listener.Accept()
			if err == nil {
				defer conn.Close()
				_, err = conn.Write([]byte("x")) // which shakes hands
			}
			served <- err
		}()
		conn, err := tls.Dial("tcp", listener.Addr().String(), tc.config)
		if err == nil {
			_, err = conn.Read(make([]byte, 1))
			_ = conn.Close()
		}
		if at := <-served; (err == nil) != tc.in || (at == nil) != tc.in {
			t.Errorf("%s: %v at the client, %v at the server", name, err, at)
		}
	}
}
