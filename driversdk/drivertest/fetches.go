package drivertest

import (
	"context"
	"encoding/json"
	"maps"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// comeAgain is what is said where there is no class to be had.
const comeAgain = 7 * time.Second

// Kinds of fetches, as subjects name them.
const (
	whatClass     = "class"
	whatSecret    = "secret"
	whatBootstrap = "bootstrap"
)

// fetches answers a driver's fetches as the manager does, or as it must not. That
// is why bus.ServeFetches will not do.
type fetches struct {
	cfg    Config
	conn   *nats.Conn
	key    *bus.SealKey
	forged *bus.SealKey

	mu      sync.Mutex
	version int
	counts  map[string]int
	waiting int             // fetches held now
	gate    chan struct{}   // closed: answers go out
	spec    json.RawMessage // instead of the class's; nil for that
	secret  map[string][]byte
	wrong   forgery
	away    bool // there is no class to be had
	refused refusal
	sealed  bool     // the driver can open seals
	outside []string // reply subjects where they must not be
}

// A refusal is a kind of fetch, and the code that it is answered with; the zero value
// refuses none.
type refusal struct {
	what string
	code driverv1.Code
}

// A forgery is what is wrong with the secrets that are sent.
type forgery int

const (
	genuine forgery = iota
	otherNonce
	otherKey
)

func (r refusal) status() *driverv1.Status {
	return &driverv1.Status{Code: r.code, Message: "the suite refuses this " + r.what}
}

func newFetches(cfg Config, conn *nats.Conn) (*fetches, error) {
	key := cfg.Key
	if key == nil {
		var err error
		if key, err = bus.NewSealKey(); err != nil {
			return nil, err
		}
	}
	forged, err := bus.NewSealKey()
	if err != nil {
		return nil, err
	}
	open := make(chan struct{})
	close(open)

	return &fetches{cfg: cfg, conn: conn, key: key, forged: forged, version: 1, counts: map[string]int{}, gate: open}, nil
}

// refs names the class and its secrets in their present version.
func (f *fetches) refs() *driverv1.ClassReference {
	f.mu.Lock()
	defer f.mu.Unlock()
	class := f.cfg.Class

	return &driverv1.ClassReference{
		Class:             f.ref(Reference{class.Namespace, class.Name}, "class"),
		Secret:            f.ref(class.SecretRef, "secret"),
		CredentialsSecret: f.ref(class.CredentialsSecretRef, "secret"),
	}
}

func (f *fetches) ref(r Reference, kind string) *driverv1.ObjectReference {
	if r.Name == "" {
		return nil
	}

	return &driverv1.ObjectReference{
		Namespace: r.Namespace, Name: r.Name, Uid: "conformance-" + kind + "-" + r.Name, ResourceVersion: strconv.Itoa(f.version),
	}
}

// named are the references of a kind that requests name.
func (f *fetches) named(what string) []*driverv1.ObjectReference {
	refs := f.refs()
	if what == whatClass {
		return []*driverv1.ObjectReference{refs.GetClass()}
	}
	var named []*driverv1.ObjectReference
	for _, ref := range []*driverv1.ObjectReference{refs.GetSecret(), refs.GetCredentialsSecret()} {
		if ref != nil {
			named = append(named, ref)
		}
	}

	return named
}

// touch gives class and secrets a new version, so that a driver has to fetch them.
func (f *fetches) touch() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
}

// alter gives out another providerSpec or secret until undo, under new versions.
func (f *fetches) alter(change func(*fetches)) (undo func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	change(f)

	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.version++
		f.spec, f.secret, f.wrong, f.away, f.refused = nil, nil, genuine, false, refusal{}
	}
}

// hold keeps answers back until release, and gives class and secrets a new
// version: whoever needs them has to wait.
func (f *fetches) hold() (release func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	gate := make(chan struct{})
	f.gate = gate

	return sync.OnceFunc(func() { close(gate) })
}

func (f *fetches) held() bool {
	f.mu.Lock()
	defer f.mu.Unlock()

	return f.waiting > 0
}

func (f *fetches) count(what string) int {
	f.mu.Lock()
	defer f.mu.Unlock()

	return f.counts[what]
}

// onFetch runs on the subscription's goroutine.
func (f *fetches) onFetch(ctx context.Context, m *nats.Msg) {
	subject, err := bus.ParseSubject(m.Subject)
	if err != nil {
		return
	}
	contentType := m.Header.Get(headerContentType)
	env, err := bus.Decode(m.Data, contentType)
	f.mu.Lock()
	f.counts[subject.Verb]++
	if !strings.HasPrefix(m.Reply, bus.InboxPrefix(subject.Provider)+".") {
		f.outside = append(f.outside, m.Reply)
		err = errOutside
	}
	gate := f.gate
	f.mu.Unlock()
	if err != nil {
		return // as the manager does
	}
	go func() {
		f.wait(ctx, gate)
		payload, err := bus.Encode(f.answer(env), contentType)
		if err == nil {
			_ = f.conn.Publish(m.Reply, payload) // the driver asks again, or fails a check
		}
	}()
}

func (f *fetches) wait(ctx context.Context, gate <-chan struct{}) {
	select {
	case <-gate:
		return
	default:
	}
	f.mu.Lock()
	f.waiting++
	f.mu.Unlock()
	select {
	case <-gate:
	case <-ctx.Done():
	}
	f.mu.Lock()
	f.waiting--
	f.mu.Unlock()
}

func (f *fetches) answer(env *driverv1.Envelope) *driverv1.Envelope {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch body := env.GetBody().(type) {
	case *driverv1.Envelope_FetchClass:
		return &driverv1.Envelope{Body: &driverv1.Envelope_FetchedClass{FetchedClass: f.class(body.FetchClass)}}
	case *driverv1.Envelope_FetchSecret:
		return &driverv1.Envelope{Body: &driverv1.Envelope_FetchedSecret{FetchedSecret: f.sealedSecret(body.FetchSecret)}}
	case *driverv1.Envelope_FetchBootstrap:
		return &driverv1.Envelope{Body: &driverv1.Envelope_FetchedBootstrap{FetchedBootstrap: f.bootstrap(body.FetchBootstrap)}}
	default:
		return &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: &driverv1.Result{
			Status: &driverv1.Status{Code: driverv1.Code_CODE_UNIMPLEMENTED, Message: "no such fetch"},
		}}}
	}
}

func (f *fetches) class(req *driverv1.FetchClassRequest) *driverv1.FetchClassResponse {
	class := f.cfg.Class
	if f.away {
		return &driverv1.FetchClassResponse{Status: &driverv1.Status{
			Code: driverv1.Code_CODE_UNAVAILABLE, Message: "no class at the moment", RetryAfter: durationpb.New(comeAgain),
		}}
	}
	if f.refused.what == whatClass {
		return &driverv1.FetchClassResponse{Status: f.refused.status()}
	}
	if req.GetClass().GetNamespace() != class.Namespace || req.GetClass().GetName() != class.Name {
		return &driverv1.FetchClassResponse{Status: &driverv1.Status{Code: driverv1.Code_CODE_NOT_FOUND, Message: "no such class"}}
	}
	spec := class.ProviderSpec
	if f.spec != nil {
		spec = f.spec
	}

	return &driverv1.FetchClassResponse{Class: &driverv1.Class{
		Reference: f.ref(Reference{class.Namespace, class.Name}, "class"), Provider: f.cfg.Provider,
		ProviderSpec: spec, Labels: class.Labels, Annotations: class.Annotations,
	}}
}

func (f *fetches) sealedSecret(req *driverv1.FetchSecretRequest) *driverv1.FetchSecretResponse {
	if f.refused.what == whatSecret {
		return &driverv1.FetchSecretResponse{Status: f.refused.status()}
	}
	ref := Reference{req.GetSecret().GetNamespace(), req.GetSecret().GetName()}
	secret := f.cfg.secret(ref)
	if secret == nil {
		return &driverv1.FetchSecretResponse{Status: &driverv1.Status{Code: driverv1.Code_CODE_NOT_FOUND, Message: "no such secret"}}
	}
	content := &driverv1.SecretContent{Nonce: req.GetNonce(), Reference: f.ref(ref, "secret"), Data: secret.Data}
	if f.secret != nil {
		content.Data = f.secret
	}
	key := f.key
	switch f.wrong {
	case otherNonce:
		content.Nonce = append([]byte("another "), req.GetNonce()...)
	case otherKey:
		key = f.forged
	case genuine:
	}
	if req.GetRecipient() == "" { // a driver that cannot open seals; this bus is for tests
		return &driverv1.FetchSecretResponse{Unsealed: content}
	}
	f.sealed = true
	sealed, err := key.Seal(content, req.GetRecipient())

	return &driverv1.FetchSecretResponse{Status: bus.StatusOf(err), Sealed: sealed}
}

func (f *fetches) bootstrap(req *driverv1.FetchBootstrapRequest) *driverv1.FetchBootstrapResponse {
	if f.refused.what == whatBootstrap {
		return &driverv1.FetchBootstrapResponse{Status: f.refused.status()}
	}
	values := maps.Clone(f.cfg.Bootstrap)
	if values == nil {
		values = map[string]string{}
	}
	values["<<MACHINE_NAME>>"] = req.GetMachine()
	content := &driverv1.BootstrapContent{Nonce: req.GetNonce(), Values: values}
	if req.GetRecipient() == "" {
		return &driverv1.FetchBootstrapResponse{Unsealed: content}
	}
	sealed, err := f.key.Seal(content, req.GetRecipient())

	return &driverv1.FetchBootstrapResponse{Status: bus.StatusOf(err), Sealed: sealed}
}
