package bus_test

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/optest"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// tlsServer is an embedded NATS that takes clients over TLS; with optional, also
// without.
func tlsServer(t *testing.T, optional bool) (srv *embedded.Server, ca string) {
	t.Helper()
	web := httptest.NewTLSServer(nil) // for its certificate, which is valid for 127.0.0.1
	defer web.Close()
	pair := web.TLS.Certificates[0]
	key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}

		return path
	}
	ca = write("cert.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}))
	keyFile := write("key.pem", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}))
	config := fmt.Sprintf("tls { cert_file: %q, key_file: %q }\nallow_non_tls: %t\n", ca, keyFile, optional)

	return bustest.Server(t, embedded.Options{ConfigFile: write("nats.conf", []byte(config))}), ca
}

// TestUnsealedAnswers has a driver ask that cannot open seals.
func TestUnsealedAnswers(t *testing.T) {
	t.Parallel()
	const plain, required, optional = "plain", "required", "optional"
	cases := map[string]struct {
		reason    string
		tls       string
		inProcess bool
		allowed   []string
		refusal   string
	}{
		"allowed":             {"the operator said so", required, false, []string{"x", optest.Provider}, ""},
		"allowed in process":  {"the manager's own pipe needs no TLS, its clients do", required, true, []string{optest.Provider}, ""},
		"not allowed":         {"sealing is what happens without a word", required, false, nil, "--unsealed-providers"},
		"another is":          {"the word counts for the provider it names", required, false, []string{"other"}, "--unsealed-providers"},
		"without TLS":         {"everybody on the wire could read it", plain, false, []string{optest.Provider}, "TLS"},
		"pipe, clients plain": {"the driver's wire counts, not the manager's", plain, true, []string{optest.Provider}, "TLS"},
		"TLS is optional":     {"the driver's wire may be plain", optional, true, []string{optest.Provider}, "TLS"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var r *fetchRig
			ca := ""
			if tc.tls == plain {
				r = &fetchRig{srv: bustest.Server(t, embedded.Options{}), key: optest.NewKey(t), lib: newLibrary()}
			} else {
				srv, file := tlsServer(t, tc.tls == optional)
				r, ca = &fetchRig{srv: srv, key: optest.NewKey(t), lib: newLibrary()}, file
			}
			cfg := bus.Config{URLs: []string{r.srv.URL()}, CA: ca}
			if tc.inProcess {
				cfg = bus.Config{InProcess: r.srv}
			}
			conn := bustest.Connect(t, cfg)
			fs, err := bus.ServeFetches(conn, optest.Cluster, r.key, r.lib, bustest.Quiet(), tc.allowed...)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(fs.Stop)
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			if err := conn.Flush(ctx); err != nil {
				t.Fatal(err)
			}

			a := newAsker(t, r.srv.URL(), ca)
			secret := a.ask(t, "secret", &driverv1.Envelope{Body: &driverv1.Envelope_FetchSecret{
				FetchSecret: &driverv1.FetchSecretRequest{Nonce: []byte("n")},
			}}).GetFetchedSecret()
			bootstrap := a.ask(t, "bootstrap", &driverv1.Envelope{Body: &driverv1.Envelope_FetchBootstrap{
				FetchBootstrap: &driverv1.FetchBootstrapRequest{Nonce: []byte("n")},
			}}).GetFetchedBootstrap()
			if tc.refusal == "" {
				content, values := secret.GetUnsealed(), bootstrap.GetUnsealed()
				if string(content.GetData()["userData"]) != marker || string(content.GetNonce()) != "n" ||
					values.GetValues()["<<TOKEN>>"] != marker || string(values.GetNonce()) != "n" {
					t.Errorf("answers are %v and %v, want the content: %s", secret, bootstrap, tc.reason)
				}

				return
			}
			for _, st := range []*driverv1.Status{secret.GetStatus(), bootstrap.GetStatus()} {
				if st.GetCode() != driverv1.Code_CODE_PERMISSION_DENIED || !strings.Contains(st.GetMessage(), tc.refusal) {
					t.Errorf("status %v, want a refusal that says %q: %s", st, tc.refusal, tc.reason)
				}
			}
			if secret.GetUnsealed() != nil || bootstrap.GetUnsealed() != nil {
				t.Error("refused, and answered nevertheless")
			}
		})
	}
}

// TestUnsealedOnlyWithoutAKey has a driver ask that can open seals, where it need
// not.
func TestUnsealedOnlyWithoutAKey(t *testing.T) {
	t.Parallel()
	srv, ca := tlsServer(t, false)
	lib, key, mine := newLibrary(), optest.NewKey(t), optest.NewKey(t)
	fs, err := bus.ServeFetches(bustest.Connect(t, bus.Config{InProcess: srv}), optest.Cluster, key, lib, bustest.Quiet(), optest.Provider)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(fs.Stop)
	answer := newAsker(t, srv.URL(), ca).ask(t, "secret", &driverv1.Envelope{Body: &driverv1.Envelope_FetchSecret{
		FetchSecret: &driverv1.FetchSecretRequest{Recipient: mine.Public()},
	}}).GetFetchedSecret()
	content := &driverv1.SecretContent{}
	if err := mine.Open(answer.GetSealed(), key.Public(), content); err != nil || string(content.GetData()["userData"]) != marker {
		t.Errorf("sealed content = %v, %v", content, err)
	}
	if answer.GetUnsealed() != nil {
		t.Error("readable as well")
	}
}

// An asker fetches as a driver in any language would.
type asker struct{ nc *nats.Conn }

func newAsker(t *testing.T, url, ca string) asker {
	t.Helper()
	opts := []nats.Option{nats.CustomInboxPrefix(bus.InboxPrefix(optest.Provider))}
	if ca != "" {
		opts = append(opts, nats.RootCAs(ca))
	}
	nc, err := nats.Connect(url, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)

	return asker{nc}
}

func (a asker) ask(t *testing.T, what string, env *driverv1.Envelope) *driverv1.Envelope {
	t.Helper()
	payload, err := bus.Encode(env, "")
	if err != nil {
		t.Fatal(err)
	}
	m, err := a.nc.Request("mcm.v1."+optest.Cluster+".fetch."+optest.Provider+"."+what, payload, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := bus.Decode(m.Data, "")
	if err != nil {
		t.Fatal(err)
	}

	return answer
}
