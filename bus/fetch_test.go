package bus_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/optest"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const marker = "this must never be readable on the bus"

// A library answers fetches out of fixed content.
type library struct {
	class  *driverv1.Class
	secret *driverv1.SecretContent
}

func newLibrary() *library {
	return &library{
		class: &driverv1.Class{Provider: optest.Provider, ProviderSpec: []byte(`{"size":"big"}`)},
		secret: &driverv1.SecretContent{
			Reference: &driverv1.ObjectReference{Namespace: "shop", Name: "s"}, Data: map[string][]byte{"userData": []byte(marker)},
		},
	}
}

func (l *library) Class(_ context.Context, who string, req *driverv1.FetchClassRequest) (*driverv1.Class, error) {
	if who != l.class.GetProvider() {
		return nil, bus.Errorf(driverv1.Code_CODE_PERMISSION_DENIED, "class %s is not of provider %s", req.GetClass().GetName(), who)
	}

	return l.class, nil
}

func (l *library) Secret(context.Context, string, *driverv1.FetchSecretRequest) (*driverv1.SecretContent, error) {
	return l.secret, nil
}

func (l *library) Bootstrap(_ context.Context, _ string, req *driverv1.FetchBootstrapRequest) (*driverv1.BootstrapContent, error) {
	return &driverv1.BootstrapContent{Values: map[string]string{"<<MACHINE_NAME>>": req.GetMachine(), "<<TOKEN>>": marker}}, nil
}

type fetchRig struct {
	srv    *embedded.Server
	key    *bus.SealKey
	lib    *library
	server *bus.FetchServer
}

func newFetchRig(t *testing.T) *fetchRig {
	t.Helper()
	r := &fetchRig{srv: bustest.Server(t, embedded.Options{}), key: optest.NewKey(t), lib: newLibrary()}
	r.serve(t, r.key)

	return r
}

// serve runs a manager until the function it returns is called.
func (r *fetchRig) serve(t *testing.T, key *bus.SealKey) (stop func()) {
	t.Helper()
	conn := bustest.Connect(t, bus.Config{URLs: []string{r.srv.URL()}, Name: "mcm"})
	fs, err := bus.ServeFetches(conn, optest.Cluster, key, r.lib, bustest.Quiet())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := conn.Flush(ctx); err != nil {
		t.Fatal(err)
	}
	r.server = fs
	once := sync.OnceFunc(fs.Stop)
	t.Cleanup(once)

	return once
}

func (r *fetchRig) client(t *testing.T, of string, pins map[string]string) *bus.FetchClient {
	t.Helper()
	conn := bustest.Connect(t, bus.Config{URLs: []string{r.srv.URL()}, Name: "driver", InboxPrefix: bus.InboxPrefix(of)})
	client, err := bus.NewFetchClient(conn, of, pins, bustest.Quiet())
	if err != nil {
		t.Fatal(err)
	}

	return client
}

func TestFetch(t *testing.T) {
	t.Parallel()
	r := newFetchRig(t)
	var tapped bytes.Buffer
	var mu sync.Mutex
	tap := bustest.Raw(t, r.srv.URL())
	if _, err := tap.Subscribe(">", func(m *nats.Msg) {
		mu.Lock()
		defer mu.Unlock()
		tapped.WriteString(m.Subject + " ")
		tapped.Write(m.Data)
	}); err != nil || tap.Flush() != nil {
		t.Fatal(err)
	}
	client := r.client(t, optest.Provider, map[string]string{optest.Cluster: r.key.Public()})
	ref := &driverv1.ObjectReference{Namespace: "shop", Name: "c"}
	class, err := client.Class(t.Context(), optest.Cluster, ref)
	if err != nil || !proto.Equal(class, r.lib.class) {
		t.Errorf("Class = %v, %v", class, err)
	}
	secret, err := client.Secret(t.Context(), optest.Cluster, ref, r.lib.secret.GetReference())
	if err != nil || string(secret.GetData()["userData"]) != marker {
		t.Errorf("Secret = %v, %v", secret, err)
	}
	if len(r.lib.secret.GetNonce()) != 0 {
		t.Error("the handler's own copy was written to")
	}
	values, err := client.Bootstrap(t.Context(), optest.Cluster, "op", &driverv1.Machine{Namespace: "shop", Name: "m"})
	if diff := cmp.Diff(map[string]string{"<<MACHINE_NAME>>": "m", "<<TOKEN>>": marker}, values); err != nil || diff != "" {
		t.Errorf("Bootstrap: %v (-want +got):\n%s", err, diff)
	}
	if err := tap.Flush(); err != nil {
		t.Fatal(err)
	}
	seen := func() string {
		mu.Lock()
		defer mu.Unlock()

		return tapped.String()
	}
	bustest.Eventually(t, "the wiretap has heard the last answer", func() bool {
		return strings.Count(seen(), bus.InboxPrefix(optest.Provider)) == 3
	})
	if strings.Contains(seen(), marker) {
		t.Error("a wiretap can read what is secret")
	}
	if !strings.Contains(seen(), "big") {
		t.Error("the wiretap heard nothing, so that this test shows nothing")
	}
}

func TestFetchTrust(t *testing.T) {
	t.Parallel()
	ref := &driverv1.ObjectReference{Namespace: "shop", Name: "s"}
	t.Run("pinned to another key", func(t *testing.T) {
		t.Parallel()
		r, other := newFetchRig(t), optest.NewKey(t)
		client := r.client(t, optest.Provider, map[string]string{optest.Cluster: other.Public()})
		_, err := client.Secret(t.Context(), optest.Cluster, ref, ref)
		wantUntrusted(t, err)
		if !strings.Contains(err.Error(), other.Public()) || !strings.Contains(err.Error(), r.key.Public()) {
			t.Errorf("error = %v, want one that names both keys", err)
		}
	})
	t.Run("another key after the first", func(t *testing.T) {
		t.Parallel()
		r := &fetchRig{srv: bustest.Server(t, embedded.Options{}), lib: newLibrary()}
		stop := r.serve(t, optest.NewKey(t))
		client := r.client(t, optest.Provider, nil) // no pin: the first key is trusted from then on
		if _, err := client.Secret(t.Context(), optest.Cluster, ref, ref); err != nil {
			t.Fatal(err)
		}
		stop()
		r.serve(t, optest.NewKey(t))
		_, err := client.Secret(t.Context(), optest.Cluster, ref, ref)
		wantUntrusted(t, err)
		if !strings.Contains(err.Error(), "is known by key") {
			t.Errorf("error = %v, want the second key refused", err)
		}
	})
	t.Run("a seal for another recipient", func(t *testing.T) {
		t.Parallel()
		r := &fetchRig{srv: bustest.Server(t, embedded.Options{}), key: optest.NewKey(t), lib: newLibrary()}
		r.answerSecrets(t, func(*driverv1.FetchSecretRequest) (string, []byte) { return optest.NewKey(t).Public(), nil })
		_, err := r.client(t, optest.Provider, nil).Secret(t.Context(), optest.Cluster, ref, ref)
		wantUntrusted(t, err)
	})
	t.Run("refusal travels", func(t *testing.T) {
		t.Parallel()
		_, err := newFetchRig(t).client(t, "other", nil).Class(t.Context(), optest.Cluster, ref)
		optest.WantError(t, err, bus.OriginDriver, driverv1.Code_CODE_PERMISSION_DENIED)
	})
	t.Run("nobody there", func(t *testing.T) {
		t.Parallel()
		r := &fetchRig{srv: bustest.Server(t, embedded.Options{})}
		_, err := r.client(t, optest.Provider, nil).Class(t.Context(), optest.Cluster, ref)
		optest.WantError(t, err, bus.OriginBus, driverv1.Code_CODE_UNAVAILABLE)
	})
	t.Run("connection without the inbox prefix", func(t *testing.T) {
		t.Parallel()
		r := &fetchRig{srv: bustest.Server(t, embedded.Options{})}
		conn := bustest.Connect(t, bus.Config{URLs: []string{r.srv.URL()}})
		if _, err := bus.NewFetchClient(conn, optest.Provider, nil, nil); err == nil || !strings.Contains(err.Error(), bus.InboxPrefix(optest.Provider)) {
			t.Errorf("error = %v, want one that names the prefix: no manager would ever answer", err)
		}
	})
}

// TestFetchWithAnOldAnswer replays a recorded answer.
// What is to be stored is sealed to the control plane that is known, and to none
// that is not.
func TestSealForAKnownControlPlane(t *testing.T) {
	t.Parallel()
	r := newFetchRig(t)
	secret := &driverv1.SealedOutcome{OperationId: "u.create.0", Message: "no capacity"}
	pinned := r.client(t, optest.Provider, map[string]string{optest.Cluster: r.key.Public()})
	if box := pinned.Seal("other", secret); box != nil {
		t.Errorf("sealed for a control plane without a key: %v", box)
	}
	box, got := pinned.Seal(optest.Cluster, secret), &driverv1.SealedOutcome{}
	if err := r.key.Open(box, box.GetSender(), got); err != nil || !proto.Equal(got, secret) {
		t.Errorf("the control plane opens %v, %v, want %v", got, err, secret)
	}
	if box := r.client(t, optest.Provider, nil).Seal(optest.Cluster, secret); box != nil {
		t.Errorf("sealed before anything is known of the control plane: %v", box)
	}
}

func TestFetchWithAnOldAnswer(t *testing.T) {
	t.Parallel()
	r := &fetchRig{srv: bustest.Server(t, embedded.Options{}), key: optest.NewKey(t), lib: newLibrary()}
	r.answerSecrets(t, func(req *driverv1.FetchSecretRequest) (string, []byte) {
		return req.GetRecipient(), []byte("of another fetch")
	})
	client := r.client(t, optest.Provider, map[string]string{optest.Cluster: r.key.Public()})
	ref := r.lib.secret.GetReference()
	_, err := client.Secret(t.Context(), optest.Cluster, ref, ref)
	wantUntrusted(t, err)
	if !strings.Contains(err.Error(), "another question") {
		t.Errorf("error = %v, want the answer refused for its nonce", err)
	}
}

// answerSecrets seals the library's secret as seal says: for whom, and with which nonce.
func (r *fetchRig) answerSecrets(t *testing.T, seal func(*driverv1.FetchSecretRequest) (recipient string, nonce []byte)) {
	t.Helper()
	nc := bustest.Raw(t, r.srv.URL())
	_, err := nc.Subscribe("mcm.v1."+optest.Cluster+".fetch.>", func(m *nats.Msg) {
		env, err := bus.Decode(m.Data, "")
		if err != nil {
			t.Error(err)

			return
		}
		content := proto.CloneOf(r.lib.secret)
		var recipient string
		recipient, content.Nonce = seal(env.GetFetchSecret())
		box, err := r.key.Seal(content, recipient)
		if err != nil {
			t.Error(err)

			return
		}
		payload, err := bus.Encode(&driverv1.Envelope{Body: &driverv1.Envelope_FetchedSecret{
			FetchedSecret: &driverv1.FetchSecretResponse{Status: &driverv1.Status{}, Sealed: box},
		}}, "")
		if err != nil || m.Respond(payload) != nil {
			t.Error(err)
		}
	})
	if err != nil || nc.Flush() != nil {
		t.Fatal(err)
	}
}

// wantUntrusted fails unless an answer was refused for its seal, nonce or key.
func wantUntrusted(tb testing.TB, err error) {
	tb.Helper()
	optest.WantError(tb, err, bus.OriginDriver, driverv1.Code_CODE_UNAUTHENTICATED)
	if !errors.Is(err, bus.ErrUntrusted) {
		tb.Errorf("error is %v, want %v", err, bus.ErrUntrusted)
	}
}

func TestFetchReplyOutsideOfTheInboxIsNotAnswered(t *testing.T) {
	t.Parallel()
	r := newFetchRig(t)
	nc := bustest.Raw(t, r.srv.URL())
	const victim = "mcm.v1.default.driver.other.delete.shop.m"
	seen, err := nc.SubscribeSync(victim)
	if err != nil {
		t.Fatal(err)
	}
	payload, err := bus.Encode(&driverv1.Envelope{Body: &driverv1.Envelope_FetchClass{
		FetchClass: &driverv1.FetchClassRequest{Class: &driverv1.ObjectReference{Name: "c"}},
	}}, "")
	if err != nil {
		t.Fatal(err)
	}
	subject := "mcm.v1." + optest.Cluster + ".fetch." + optest.Provider + ".class"
	for _, reply := range []string{victim, bus.InboxPrefix("other") + ".x", bus.InboxPrefix(optest.Provider) + "x.y"} {
		if err := nc.PublishRequest(subject, reply, payload); err != nil {
			t.Fatal(err)
		}
	}
	// One that is answered, behind them in the same queue.
	if _, err := r.client(t, optest.Provider, nil).Class(t.Context(), optest.Cluster, &driverv1.ObjectReference{Name: "c"}); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if n, _, _ := seen.Pending(); n != 0 {
		t.Error("a driver had the manager publish for it")
	}
	if n := r.server.Dropped(); n != 3 {
		t.Errorf("%d fetches are counted as dropped, want 3", n)
	}
}

func TestFetchTooLarge(t *testing.T) {
	t.Parallel()
	r := newFetchRig(t)
	r.lib.class.ProviderSpec = bytes.Repeat([]byte("x"), 5<<20)
	_, err := r.client(t, optest.Provider, nil).Class(t.Context(), optest.Cluster, &driverv1.ObjectReference{Name: "c"})
	if err == nil || !strings.Contains(err.Error(), "max_payload") {
		t.Errorf("error = %v, want one that says what to raise", err)
	}
}

func TestSealKey(t *testing.T) {
	t.Parallel()
	a, b := optest.NewKey(t), optest.NewKey(t)
	seed, err := a.Seed()
	if err != nil {
		t.Fatal(err)
	}
	again, err := bus.ParseSealKey(seed)
	if err != nil || again.Public() != a.Public() {
		t.Errorf("ParseSealKey(Seed()) = %v, %v; want the same key", again, err)
	}
	if _, err := bus.ParseSealKey([]byte("SUAPASSWORD")); err == nil || strings.Contains(err.Error(), "SUAPASSWORD") {
		t.Errorf("error = %v, want one without the seed", err)
	}
	for name, text := range map[string]string{"nothing": "", "the seed": string(seed), "another kind": "UA" + a.Public()[2:]} {
		if err := bus.ValidPublicKey(text); err == nil || text != "" && strings.Contains(err.Error(), text) {
			t.Errorf("ValidPublicKey of %s = %v, want an error without it", name, err)
		}
	}
	if err := bus.ValidPublicKey(a.Public()); err != nil {
		t.Error(err)
	}
	if _, err := a.Seal(&driverv1.Machine{}, "nobody"); bus.CodeOf(err) != driverv1.Code_CODE_INVALID_ARGUMENT {
		t.Errorf("error = %v, want InvalidArgument: the asker named no key", err)
	}
	box, err := a.Seal(&driverv1.Machine{Name: "m"}, b.Public())
	if err != nil {
		t.Fatal(err)
	}
	m := &driverv1.Machine{}
	if err := b.Open(box, a.Public(), m); err != nil || m.GetName() != "m" {
		t.Errorf("Open = %v, %v", m, err)
	}
	if err := a.Open(box, a.Public(), m); err == nil {
		t.Error("opened by a key it was not sealed for")
	}
	box.Box[len(box.GetBox())-1] ^= 1
	if err := b.Open(box, a.Public(), m); err == nil {
		t.Error("opened although it was tampered with")
	}
}
