package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"flag"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus/bustest"
)

// parse returns the options of a command line, and what is wrong with it.
func parse(args ...string) (*options, error) {
	fs := flag.NewFlagSet("test", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	o := newOptions(fs)
	err := fs.Parse(args)
	if err == nil {
		err = o.complete()
	}

	return o, err
}

func TestOptions_Refused(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"all interfaces":        {[]string{"--grpc-listen=:5000"}, "set --tls-cert, --tls-key and --tls-client-ca, or listen on 127.0.0.1"},
		"another address":       {[]string{"--grpc-listen=192.0.2.1:5000"}, "--grpc-listen=192.0.2.1:5000 is beyond loopback"},
		"a name":                {[]string{"--grpc-listen=bridge.example:5000"}, "is beyond loopback"},
		"TLS in part":           {[]string{"--grpc-listen=:5000", "--tls-cert=a", "--tls-key=b"}, "belong together"},
		"TLS in part, loopback": {[]string{"--tls-client-ca=c"}, "belong together"},
		"no port":               {[]string{"--grpc-listen=localhost"}, "--grpc-listen: "},
		"kind without provider": {[]string{"--kind=FooMachineClass"}, "want Kind=provider"},
		"provider in capitals":  {[]string{"--kind=FooMachineClass=Foo"}, "want a provider in lower case"},
		"argument":              {[]string{"aws"}, "unexpected argument"},
		"wrong driver flag":     {[]string{"--slots=-1"}, "slots: -1 is negative"},
	} {
		if _, err := parse(tc.args...); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: want an error with %q, got: %v", name, tc.want, err)
		}
	}
}

func TestOptions_Accepted(t *testing.T) {
	t.Parallel()
	for name, args := range map[string][]string{
		"default":             nil,
		"loopback by name":    {"--grpc-listen=localhost:50000"},
		"loopback of IPv6":    {"--grpc-listen=[::1]:5000"},
		"TLS on loopback":     {"--tls-cert=a", "--tls-key=b", "--tls-client-ca=c"},
		"TLS on all":          {"--grpc-listen=:5000", "--tls-cert=a", "--tls-key=b", "--tls-client-ca=c"},
		"loopback of 127.1.0": {"--grpc-listen=127.1.0.1:5000"},
	} {
		if _, err := parse(args...); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	o, err := parse("--kind=AWSMachineClass=ec2,FooMachineClass=foo", "--kind=BarMachineClass=bar")
	if err != nil || o.kinds["AWSMachineClass"] != "ec2" || o.kinds["FooMachineClass"] != "foo" || o.kinds["BarMachineClass"] != "bar" ||
		len(o.kinds) != 3 { // what is not named is not served
		t.Errorf("%v, kinds %s", err, o.kinds)
	}
}

// certificate writes a self-signed certificate for both sides, and returns what the flags and the
// client's variable name.
func certificate(t *testing.T) (prefix string, flags []string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	signed, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	key, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	prefix = filepath.Join(t.TempDir(), "tls")
	for suffix, block := range map[string]*pem.Block{
		".crt": {Type: "CERTIFICATE", Bytes: signed}, "-ca.crt": {Type: "CERTIFICATE", Bytes: signed}, ".key": {Type: "PRIVATE KEY", Bytes: key},
	} {
		if err := os.WriteFile(prefix+suffix, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}

	return prefix, []string{"--tls-cert", prefix + ".crt", "--tls-key", prefix + ".key", "--tls-client-ca", prefix + "-ca.crt"}
}

// With certificates only clients that have one get in, those of 2018 with TLS 1.2.
func TestTLS(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	prefix, flags := certificate(t)
	_, address := w.bridge(flags...)
	w.client("infra", address, "VirtualMachineClass", caVariable+"="+prefix)
	w.call(w.create("virtual", "m1"))
	other, _ := certificate(t)
	for name, env := range map[string][]string{"plaintext": nil, "certificate of another authority": {caVariable + "=" + other}} {
		p := start(t, "service", append([]string{addressVariable + "=" + address, kindVariable + "=VirtualMachineClass"}, env...))
		bustest.Receive(t, "the end of the client with "+name, p.done)
		if !strings.Contains(p.output(), "code = Unavailable") {
			t.Errorf("%s: the client said %s", name, p.output())
		}
	}
	if n := len(w.caller.Replicas()); n != 1 {
		t.Errorf("%d replicas, want that of the one good client", n)
	}
}

func TestTLS_FilesMissing(t *testing.T) {
	t.Parallel()
	o, err := parse("--grpc-listen=127.0.0.1:0", "--tls-cert=/nowhere/tls.crt", "--tls-key=/nowhere/tls.key", "--tls-client-ca=/nowhere/ca.crt")
	if err != nil {
		t.Fatal(err)
	}
	if err := run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "--tls-cert and --tls-key: open /nowhere/tls.crt") {
		t.Errorf("got %v", err)
	}
}
