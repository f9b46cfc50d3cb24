package embedded_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/machinebus/machinebus/bus/embedded"
)

// issue writes a new key and a certificate, its own authority, to tls.key and tls.crt in dir.
func issue(t *testing.T, dir string) *x509.CertPool {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	cert := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	write(t, dir, "tls.key", string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})))
	write(t, dir, "tls.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
	pool := x509.NewCertPool()
	if cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	pool.AddCert(cert)

	return pool
}

// What renews certificates does not restart anything.
func TestReload(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	old := issue(t, dir)
	const users = `authorization { users: [{user: a, password: hidden}, {user: in, password: x, allowed_connection_types: ["IN_PROCESS"]}] }
no_auth_user: in
`
	settings := fmt.Sprintf("tls { cert_file: %q, key_file: %q }\n%s", filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"), users)
	srv := mustStart(t, embedded.Options{StoreDir: t.TempDir(), ConfigFile: write(t, dir, "nats.conf", settings)})
	trusting := func(pool *x509.CertPool) []nats.Option {
		return []nats.Option{nats.Secure(&tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS13}), nats.UserInfo("a", "hidden")}
	}
	cut := func(*nats.Conn, error) { t.Error("a connection that stood was cut") }
	standing := connect(t, srv.URL(), append(trusting(old), nats.DisconnectErrHandler(cut))...)
	js, err := jetstream.New(standing)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "kept", Subjects: []string{"kept"}}); err != nil {
		t.Fatal(err)
	}
	inside := connect(t, "", nats.InProcessServer(srv), nats.DisconnectErrHandler(cut))
	if err := srv.Reload(); err != nil {
		t.Errorf("nothing has changed: %v", err)
	}

	renewed := issue(t, dir)
	connect(t, srv.URL(), trusting(old)...)
	if err := srv.Reload(); err != nil {
		t.Fatal(err)
	}
	connect(t, srv.URL(), trusting(renewed)...)
	if nc, err := nats.Connect(srv.URL(), trusting(old)...); err == nil {
		nc.Close()
		t.Error("the server still shows the old certificate")
	}

	write(t, dir, "tls.crt", "half a file")
	if err := srv.Reload(); err == nil || !strings.Contains(err.Error(), "nats.conf:1:0: error parsing X509 certificate") {
		t.Errorf("the error does not name what is wrong: %v", err)
	}
	connect(t, srv.URL(), trusting(renewed)...)

	last := issue(t, dir)
	if err := srv.Reload(); err != nil {
		t.Fatal(err)
	}
	connect(t, srv.URL(), trusting(last)...)
	if _, err := js.Publish(t.Context(), "kept", nil); err != nil || inside.Flush() != nil {
		t.Errorf("what stood before does not work: %v", err)
	}
	standing.SetDisconnectErrHandler(nil)
	inside.SetDisconnectErrHandler(nil)

	write(t, dir, "nats.conf", users)
	if err := srv.Reload(); err == nil || !strings.Contains(err.Error(), "restart mcm") || !srv.RequiresTLS() {
		t.Errorf("TLS is switched off while the server runs: error = %v", err)
	}
	connect(t, srv.URL(), trusting(last)...)
}
