package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	logsapi "k8s.io/component-base/logs/api/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/autoscaler"
	"github.com/machinebus/machinebus/mcm/kubetest"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

// bounded is how long anything here may take.
const bounded = time.Minute

// control is the control cluster.
var control *envtest.Environment

// TestMain lets several tests of one process run the program.
func TestMain(m *testing.M) {
	logsapi.ReapplyHandling = logsapi.ReapplyHandlingIgnoreUnchanged
	control = kubetest.Environment()
	kubetest.Main(m, control, func(*rest.Config) error { return nil })
}

// An authority signs certificates.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t}
	template := &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	a.cert, a.key = a.sign("authority", template)

	return a
}

func (a *authority) sign(name string, template *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	template.SerialNumber, template.Subject = big.NewInt(time.Now().UnixNano()), pkix.Name{CommonName: name}
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}

	return cert, key
}

// issue returns a certificate and its key as PEM.
func (a *authority) issue(name string) (certPEM, keyPEM []byte) {
	a.t.Helper()
	cert, key := a.sign(name, &x509.Certificate{
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	})
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}

	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})
}

func (a *authority) pem() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
}

// client returns the credentials of a client that trusts server; nil signs as
// no authority.
func (a *authority) client(server *authority, name string) credentials.TransportCredentials {
	a.t.Helper()
	pool := x509.NewCertPool()
	pool.AddCert(server.cert)
	cfg := &tls.Config{RootCAs: pool, ServerName: "127.0.0.1", MinVersion: tls.VersionTLS12}
	if name != "" {
		pair, err := tls.X509KeyPair(a.issue(name))
		if err != nil {
			a.t.Fatal(err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}

	return credentials.NewTLS(cfg)
}

// files are what --tls-cert, --tls-key and --client-ca name.
type files struct{ cert, key, ca string }

func newFiles(t *testing.T, server, clients *authority) files {
	t.Helper()
	dir := t.TempDir()
	f := files{filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"), filepath.Join(dir, "ca.crt")}
	f.write(t, server, clients)

	return f
}

func (f files) write(t *testing.T, server, clients *authority) {
	t.Helper()
	cert, key := server.issue("gateway")
	for name, content := range map[string][]byte{f.cert: cert, f.key: key, f.ca: clients.pem()} {
		if err := os.WriteFile(name, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()

	return l.Addr().String()
}

func call(t *testing.T, address string, creds credentials.TransportCredentials, within time.Duration) ([]*externalgrpc.NodeGroup, error) {
	t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(creds))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	c := externalgrpc.NewCloudProviderClient(conn)
	if _, err := c.Refresh(ctx, &externalgrpc.RefreshRequest{}); err != nil {
		return nil, err
	}
	out, err := c.NodeGroups(ctx, &externalgrpc.NodeGroupsRequest{})

	return out.GetNodeGroups(), err
}

// TestProgram runs the whole program against an API server.
func TestProgram(t *testing.T) {
	kube, err := client.New(control.Config, client.Options{Scheme: kubetest.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	err = kube.Create(t.Context(), &v1alpha1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{
		Namespace: "default", Name: "workers", Annotations: map[string]string{autoscaler.AnnotationKeyMax: "5"},
	}})
	if err != nil {
		t.Fatal(err)
	}
	proxy := kubetest.NewProxy(t, control.Config)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	config := clientcmdapi.NewConfig()
	config.Clusters["c"], config.Contexts["c"] = &clientcmdapi.Cluster{Server: proxy.Config().Host}, &clientcmdapi.Context{Cluster: "c"}
	config.CurrentContext = "c"
	if err := clientcmd.WriteToFile(*config, kubeconfig); err != nil {
		t.Fatal(err)
	}
	server, clients, others := newAuthority(t), newAuthority(t), newAuthority(t)
	f := newFiles(t, server, clients)
	address, health := freeAddress(t), freeAddress(t)
	_, port, _ := net.SplitHostPort(health)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cmd := newCommand()
	cmd.SetArgs([]string{
		"--kubeconfig", kubeconfig, "--listen", address, "--address=127.0.0.1", "--port", port,
		"--tls-cert", f.cert, "--tls-key", f.key, "--client-ca", f.ca,
	})
	done := make(chan error, 1)
	says := func(path string) (code int) {
		select {
		case err := <-done:
			t.Fatal("ended:", err)
		default:
		}
		res, err := http.Get("http://" + health + path)
		if err != nil {
			return 0
		}
		defer res.Body.Close()

		return res.StatusCode
	}
	proxy.Hold("machines")
	proxy.Refuse("GET machines", true)
	go func() { done <- cmd.ExecuteContext(ctx) }()

	// Before it has read everything it does not answer, but lives, so that it is not restarted.
	bustest.Eventually(t, "alive", func() bool { return says("/healthz") == http.StatusOK })
	if code := says("/readyz"); code != http.StatusInternalServerError {
		t.Errorf("/readyz says %d before all machines are read", code)
	}
	if groups, err := call(t, address, clients.client(server, "autoscaler"), time.Second); err == nil {
		t.Errorf("it returns %v before all machines are read", groups)
	}
	proxy.Refuse("GET machines", false)
	proxy.Release("machines")
	bustest.Eventually(t, "ready", func() bool { return says("/readyz") == http.StatusOK })

	groups, err := call(t, address, clients.client(server, "autoscaler"), bounded)
	if err != nil || len(groups) != 1 || groups[0].GetId() != "default/workers" {
		t.Fatalf("groups %v, %v", groups, err)
	}
	for name, creds := range map[string]credentials.TransportCredentials{
		"plaintext":                 insecure.NewCredentials(),
		"no certificate":            clients.client(server, ""),
		"certificate of another CA": others.client(server, "autoscaler"),
		"server of another CA":      clients.client(others, "autoscaler"),
	} {
		if _, err := call(t, address, creds, bounded); status.Code(err) != codes.Unavailable {
			t.Errorf("%s: want a connection that fails, got: %v", name, err)
		}
	}

	// New files are used without a restart, broken ones are not.
	if err := os.WriteFile(f.cert, []byte("half of a cert"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := call(t, address, clients.client(server, "autoscaler"), bounded); err != nil {
		t.Error("while the files are being replaced, those before serve:", err)
	}
	f.write(t, others, others)
	if _, err := call(t, address, others.client(others, "autoscaler"), bounded); err != nil {
		t.Error("new certificates:", err)
	}
	if _, err := call(t, address, clients.client(others, "autoscaler"), bounded); status.Code(err) != codes.Unavailable {
		t.Errorf("clients of the former authority must be refused, got: %v", err)
	}

	res, err := http.Get("http://" + health + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var metrics bytes.Buffer
	if _, err := metrics.ReadFrom(res.Body); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(metrics.String(), `mcm_autoscaler_call_duration_seconds_count{code="OK",method="NodeGroups"}`) {
		t.Error("calls are not counted")
	}
	cancel()
	if err := <-done; err != nil {
		t.Error("stopped with:", err)
	}
}

func TestBadInput(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	f := newFiles(t, a, a)
	tlsFlags := []string{"--tls-cert", f.cert, "--tls-key", f.key, "--client-ca", f.ca}
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"no TLS":              {nil, "--tls-cert, --tls-key and --client-ca are needed"},
		"TLS in part":         {tlsFlags[:4], "--tls-cert, --tls-key and --client-ca are needed"},
		"TLS and none":        {append([]string{"--allow-plaintext"}, tlsFlags...), "cannot be combined"},
		"missing file":        {[]string{"--tls-cert", f.cert + "x", "--tls-key", f.key, "--client-ca", f.ca}, "--tls-cert and --tls-key: open"},
		"no CA in the file":   {[]string{"--tls-cert", f.cert, "--tls-key", f.key, "--client-ca", f.key}, "contains no PEM certificate"},
		"nodes":               {[]string{"--allow-plaintext", "--nodes=1:a"}, "--nodes: \"1:a\": want min:max:namespace.name"},
		"nodes twice":         {[]string{"--allow-plaintext", "--nodes=1:2:default.a", "--nodes=1:3:default.a"}, "default/a is given twice"},
		"nodes elsewhere":     {[]string{"--allow-plaintext", "--nodes=1:2:shop.a"}, "only namespace default is served"},
		"address":             {[]string{"--allow-plaintext", "--listen=here"}, "--listen: "},
		"marks":               {[]string{"--allow-plaintext", "--marks=colour"}, "want annotation or annotation-names"},
		"kubeconfig":          {[]string{"--allow-plaintext", "--listen=127.0.0.1:0", "--kubeconfig=/nowhere"}, "--kubeconfig: "},
		"outside any cluster": {[]string{"--allow-plaintext", "--listen=127.0.0.1:0"}, "set --kubeconfig="},
	} {
		cmd := newCommand()
		cmd.SetArgs(tc.args)
		ctx, cancel := context.WithTimeout(t.Context(), bounded)
		err := cmd.ExecuteContext(ctx)
		cancel()
		if err == nil || !strings.Contains(fmt.Sprint(err), tc.want) {
			t.Errorf("%s: want an error with %q, got: %v", name, tc.want, err)
		}
	}
}

// Without TLS the default admits only this host.
func TestListensByDefault(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		tls    tlsOptions
		listen string
		want   string
	}{
		"TLS":            {tlsOptions{cert: "a", key: "b", clientCA: "c"}, "", ":8086"},
		"plaintext":      {tlsOptions{plaintext: true}, "", "127.0.0.1:8086"},
		"plaintext, set": {tlsOptions{plaintext: true}, ":1", ":1"},
	} {
		o := options{tls: tc.tls, listen: tc.listen, nats: natsOptions{cluster: "default"}, namespace: "default", address: "127.0.0.1", port: 1}
		if err := o.complete(); err != nil || o.listen != tc.want {
			t.Errorf("%s: listens on %q, want %q; %v", name, o.listen, tc.want, err)
		}
	}
}

// A URL with a password comes by the environment, and the flag wins over it.
func TestNATSFromTheEnvironment(t *testing.T) {
	t.Setenv("NATS_URL", "tls://a:1,tls://b:2")
	for name, tc := range map[string]struct {
		urls, want []string
	}{
		"environment": {nil, []string{"tls://a:1", "tls://b:2"}},
		"flag":        {[]string{"tls://c:3"}, []string{"tls://c:3"}},
	} {
		o := natsOptions{config: bus.Config{URLs: tc.urls}, cluster: "default"}
		o.complete()
		if !slices.Equal(o.config.URLs, tc.want) {
			t.Errorf("%s: %v, want %v", name, o.config.URLs, tc.want)
		}
	}
}
