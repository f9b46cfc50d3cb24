package bus_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
)

// A server that verifies clients takes one with a certificate, and no other.
func TestClientCertificate(t *testing.T) {
	t.Parallel()
	cert, key := selfSigned(t)
	file := filepath.Join(t.TempDir(), "nats.conf")
	config := fmt.Sprintf("tls { cert_file: %q, key_file: %q, ca_file: %q, verify: true }\n", cert, key, cert)
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	url := bustest.Server(t, embedded.Options{ConfigFile: file}).URL()
	with, err := bus.Connect(t.Context(), bus.Config{URLs: []string{url}, CA: cert, Cert: cert, Key: key, FailFast: true})
	if err != nil {
		t.Fatal(err)
	}
	defer with.Close()
	if !with.Up() {
		t.Error("it is not connected")
	}
	without, err := bus.Connect(t.Context(), bus.Config{URLs: []string{url}, CA: cert, FailFast: true})
	if err == nil {
		without.Close()
		t.Error("a client without a certificate is connected")
	}
}

// selfSigned makes a certificate for both sides of a connection to 127.0.0.1.
func selfSigned(tb testing.TB) (cert, key string) {
	tb.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	signed, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		tb.Fatal(err)
	}
	encoded, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		tb.Fatal(err)
	}
	dir := tb.TempDir()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: signed}, key: {Type: "PRIVATE KEY", Bytes: encoded}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			tb.Fatal(err)
		}
	}

	return cert, key
}
