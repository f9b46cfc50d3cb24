package bus

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// fetchTimeout bounds one try of a fetch, fetchTries how often a lost one is
// asked again.
const (
	fetchTimeout = 2 * time.Second
	fetchTries   = 3
	nonceBytes   = 16
)

// ErrUntrusted is wrapped by the error of a fetch whose answer was refused here: its
// seal, nonce or key is not what it has to be [FETCH-2] [FETCH-3]. The code is
// Unauthenticated.
var ErrUntrusted = errors.New("the answer cannot be trusted")

var errOtherQuestion = untrustedf("it belongs to another question")

func untrustedf(format string, args ...any) error {
	return Errorf(driverv1.Code_CODE_UNAUTHENTICATED, "%w: %w", ErrUntrusted, fmt.Errorf(format, args...))
}

// A FetchClient is how a driver asks a control plane for classes, secrets and
// bootstrap values. It is safe for concurrent use.
type FetchClient struct {
	conn     *Conn
	provider string
	key      *SealKey
	log      *slog.Logger

	mu   sync.Mutex
	pins map[string]string // public key of the control plane, by cluster
}

// NewFetchClient makes a client with a fresh curve key of its own. Pins are the
// public keys of control planes by cluster; a control plane without one is
// trusted at its first answer and held to that key from then on.
func NewFetchClient(conn *Conn, provider string, pins map[string]string, log *slog.Logger) (*FetchClient, error) {
	if err := ValidToken("provider", provider); err != nil {
		return nil, err
	}
	if got := conn.nc.Opts.InboxPrefix; got != InboxPrefix(provider) {
		return nil, fmt.Errorf("the connection's inbox prefix is %q, but managers answer drivers of provider %s only below %q: set Config.InboxPrefix",
			got, provider, InboxPrefix(provider))
	}
	key, err := NewSealKey()
	if err != nil {
		return nil, err
	}
	if log == nil {
		log = slog.Default()
	}
	f := &FetchClient{conn: conn, provider: provider, key: key, log: log, pins: map[string]string{}}
	maps.Copy(f.pins, pins)

	return f, nil
}

// Class fetches a class of the client's provider. The version found may be
// newer than the one asked for.
func (f *FetchClient) Class(ctx context.Context, cluster string, ref *driverv1.ObjectReference) (*driverv1.Class, error) {
	env, err := f.ask(ctx, cluster, fetchClass, &driverv1.Envelope{
		Body: &driverv1.Envelope_FetchClass{FetchClass: &driverv1.FetchClassRequest{Class: ref}},
	})
	if err != nil {
		return nil, fmt.Errorf("fetch class %s/%s: %w", ref.GetNamespace(), ref.GetName(), err)
	}
	answer := env.GetFetchedClass()
	if err := ErrorOf(answer.GetStatus()); err != nil {
		return nil, err
	}
	if answer.GetClass() == nil {
		return nil, errors.New("fetch class: the answer holds no class")
	}

	return answer.GetClass(), nil
}

// Secret fetches a secret that class refers to.
func (f *FetchClient) Secret(ctx context.Context, cluster string, class, secret *driverv1.ObjectReference) (*driverv1.SecretContent, error) {
	nonce := newNonce()
	env, err := f.ask(ctx, cluster, fetchSecret, &driverv1.Envelope{
		Body: &driverv1.Envelope_FetchSecret{FetchSecret: &driverv1.FetchSecretRequest{
			Class: class, Secret: secret, Recipient: f.key.Public(), Nonce: nonce,
		}},
	})
	if err != nil {
		return nil, fmt.Errorf("fetch secret %s/%s: %w", secret.GetNamespace(), secret.GetName(), err)
	}
	answer := env.GetFetchedSecret()
	if err := ErrorOf(answer.GetStatus()); err != nil {
		return nil, err
	}
	content := &driverv1.SecretContent{}
	if err := f.open(cluster, answer.GetSealed(), content); err != nil {
		return nil, fmt.Errorf("fetch secret %s/%s: %w", secret.GetNamespace(), secret.GetName(), err)
	}
	if !bytes.Equal(content.GetNonce(), nonce) || content.GetReference().GetName() != secret.GetName() ||
		content.GetReference().GetNamespace() != secret.GetNamespace() {
		return nil, fmt.Errorf("fetch secret %s/%s: %w", secret.GetNamespace(), secret.GetName(), errOtherQuestion)
	}

	return content, nil
}

// Bootstrap fetches what replaces the placeholders in a machine's user data,
// while operation is in flight.
func (f *FetchClient) Bootstrap(ctx context.Context, cluster, operationID string, m *driverv1.Machine) (map[string]string, error) {
	nonce := newNonce()
	env, err := f.ask(ctx, cluster, fetchBootstrap, &driverv1.Envelope{
		Body: &driverv1.Envelope_FetchBootstrap{FetchBootstrap: &driverv1.FetchBootstrapRequest{
			OperationId: operationID, Namespace: m.GetNamespace(), Machine: m.GetName(), MachineUid: m.GetUid(),
			Recipient: f.key.Public(), Nonce: nonce,
		}},
	})
	if err != nil {
		return nil, fmt.Errorf("fetch bootstrap values of machine %s/%s: %w", m.GetNamespace(), m.GetName(), err)
	}
	answer := env.GetFetchedBootstrap()
	if err := ErrorOf(answer.GetStatus()); err != nil {
		return nil, err
	}
	content := &driverv1.BootstrapContent{}
	if err := f.open(cluster, answer.GetSealed(), content); err != nil {
		return nil, fmt.Errorf("fetch bootstrap values of machine %s/%s: %w", m.GetNamespace(), m.GetName(), err)
	}
	if !bytes.Equal(content.GetNonce(), nonce) {
		return nil, fmt.Errorf("fetch bootstrap values of machine %s/%s: %w", m.GetNamespace(), m.GetName(), errOtherQuestion)
	}

	return content.GetValues(), nil
}

func newNonce() []byte {
	nonce := make([]byte, nonceBytes)
	_, _ = rand.Read(nonce) // never fails

	return nonce
}

// open opens a box with the key this control plane is known by [FETCH-3]. The first key is
// the one, so answers are opened one after the other.
func (f *FetchClient) open(cluster string, box *driverv1.Sealed, m proto.Message) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	pin, known := f.pins[cluster]
	if !known {
		pin = box.GetSender()
	}
	if sender := box.GetSender(); sender != pin {
		return untrustedf("control plane %q sealed with key %s, but is known by key %s: "+
			"if the former is its key now, give that to drivers (driversdk: --control-plane-key) and restart them", cluster, sender, pin)
	}
	if err := f.key.Open(box, pin, m); err != nil {
		return untrustedf("%w", err)
	}
	if !known {
		f.pins[cluster] = pin
		f.log.Warn("no key of this control plane is configured; trusting the first key it used", "cluster", cluster, "key", pin)
	}

	return nil
}

// ask sends a fetch and waits for its answer. A fetch changes nothing, so a
// lost one is asked again.
func (f *FetchClient) ask(ctx context.Context, cluster, what string, env *driverv1.Envelope) (*driverv1.Envelope, error) {
	payload, err := Encode(env, "")
	if err != nil {
		return nil, err
	}
	subject := Pattern(cluster, TreeFetch, f.provider, what)
	for range fetchTries {
		if !f.conn.Up() {
			return nil, NothingRanf("not connected to NATS; waiting for the connection")
		}
		var m *nats.Msg
		tryCtx, cancel := context.WithTimeout(ctx, fetchTimeout)
		m, err = f.conn.nc.RequestWithContext(tryCtx, subject, payload)
		cancel()
		switch {
		case err == nil:
			return answerOf(m)
		case ctx.Err() != nil:
			return nil, fmt.Errorf("ask control plane %q: %w", cluster, ctx.Err())
		case errors.Is(err, nats.ErrNoResponders):
			return nil, NothingRanf("no manager of control plane %q is connected", cluster)
		}
	}

	return nil, OutcomeUnknownf("control plane %q does not answer: %w", cluster, err)
}

// answerOf decodes an answer; a bare result is the manager's way to say why it
// cannot answer at all.
func answerOf(m *nats.Msg) (*driverv1.Envelope, error) {
	env, err := DecodeMessage(m)
	if err != nil {
		return nil, err
	}
	if refusal := env.GetResult(); refusal != nil {
		return nil, ErrorOf(refusal.GetStatus())
	}

	return env, nil
}

// Seal seals m for a control plane whose key is known, or returns nil.
func (f *FetchClient) Seal(cluster string, m proto.Message) *driverv1.Sealed {
	f.mu.Lock()
	pin, known := f.pins[cluster]
	f.mu.Unlock()
	if !known {
		return nil
	}
	box, err := f.key.Seal(m, pin)
	if err != nil {
		f.log.Warn("outcome not sealed", "cluster", cluster, "err", err)

		return nil
	}

	return box
}
