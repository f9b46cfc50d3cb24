package bench

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// comeAgain is the retry_after where there is no class to be had.
const comeAgain = 7 * time.Second

// Kinds of fetches, as subjects name them.
const (
	FetchClass     = "class"
	FetchSecret    = "secret"
	FetchBootstrap = "bootstrap"
)

// Fetches answers a driver's fetches as the manager does, or as [Answers] has it: the manager's own
// server gives no wrong answers.
type Fetches struct {
	ctx    context.Context
	cfg    Config
	conn   *nats.Conn
	key    *bus.SealKey
	forged *bus.SealKey

	mu      sync.Mutex
	answers Answers
	version int
	seen    Seen
	gate    <-chan struct{} // closed: answers go out
}

// Answers is what is wrong with the answers to fetches; the zero value is nothing.
type Answers struct {
	// NoClass: there is no class to be had.
	NoClass bool
	// Spec is sent instead of the class's providerSpec, and Secret instead of a secret's data.
	Spec   json.RawMessage
	Secret map[string][]byte
	// Nonce: secrets come with another nonce than was asked with. Seal: they are sealed with another key.
	Nonce, Seal bool
	// Refused is a kind of fetch that is answered Code.
	Refused string
	Code    driverv1.Code
}

func newFetches(ctx context.Context, cfg Config, conn *nats.Conn) (*Fetches, error) {
	forged, err := bus.NewSealKey()
	key, keyErr := cfg.Key, error(nil)
	if key == nil {
		key, keyErr = bus.NewSealKey()
	}
	open := make(chan struct{})
	close(open)

	return &Fetches{ctx: ctx, cfg: cfg, conn: conn, key: key, forged: forged, version: 1, seen: Seen{Counts: map[string]int{}}, gate: open}, errors.Join(err, keyErr)
}

// confidential returns what the driver must not reveal, by its name.
func (f *Fetches) confidential() map[string]string {
	values := map[string]string{}
	for _, secret := range f.cfg.Secrets {
		for key, value := range secret.Data {
			values["secret "+secret.Name+", key "+key] = string(value)
		}
	}
	for name, value := range f.cfg.Bootstrap {
		values["bootstrap value "+name] = value
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for key, value := range f.answers.Secret {
		values["a secret with a wrong value, key "+key] = string(value)
	}

	return values
}

// Refs names the class and its secrets in their present version.
func (f *Fetches) Refs() *driverv1.ClassReference {
	f.mu.Lock()
	defer f.mu.Unlock()
	class := f.cfg.Class

	return &driverv1.ClassReference{
		Class:             f.ref(Reference{class.Namespace, class.Name}, "class"),
		Secret:            f.ref(class.SecretRef, "secret"),
		CredentialsSecret: f.ref(class.CredentialsSecretRef, "secret"),
	}
}

func (f *Fetches) ref(r Reference, kind string) *driverv1.ObjectReference {
	if r.Name == "" {
		return nil
	}

	return &driverv1.ObjectReference{
		Namespace: r.Namespace, Name: r.Name, Uid: "conformance-" + kind + "-" + r.Name, ResourceVersion: strconv.Itoa(f.version),
	}
}

// Named returns the references of a kind that requests name.
func (f *Fetches) Named(what string) []*driverv1.ObjectReference {
	refs := f.Refs()
	if what == FetchClass {
		return []*driverv1.ObjectReference{refs.GetClass()}
	}
	secrets := []*driverv1.ObjectReference{refs.GetSecret(), refs.GetCredentialsSecret()}

	return slices.DeleteFunc(secrets, func(ref *driverv1.ObjectReference) bool { return ref == nil })
}

// Touch gives class and secrets a new version, so that a driver has to fetch them.
func (f *Fetches) Touch() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
}

// With gives these answers while do runs, under new versions.
func (f *Fetches) With(answers Answers, do func()) {
	set := func(answers Answers) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.version++
		f.answers = answers
	}
	set(answers)
	defer set(Answers{})
	do()
}

// HoldFetches keeps answers back until release, or until the check ends. It gives class and secrets a new version, so that a
// driver that needs them has to wait.
func (c *Check) HoldFetches() (release func()) {
	gate := make(chan struct{})
	release = sync.OnceFunc(func() { close(gate) })
	c.Cleanup(release)
	c.Fetches.mu.Lock()
	defer c.Fetches.mu.Unlock()
	c.Fetches.version++
	c.Fetches.gate = gate

	return release
}

// Seen is what came of a driver's fetches.
type Seen struct {
	// Counts has how many fetches of a kind have come, and Waiting how many wait for their answers.
	Counts  map[string]int
	Waiting int
	// Opens: the driver has asked for a secret that it can open.
	Opens bool
	// Outside are reply subjects that are not below the provider's inbox prefix.
	Outside []string
}

// Seen returns what came so far.
func (f *Fetches) Seen() Seen {
	f.mu.Lock()
	defer f.mu.Unlock()
	seen := f.seen
	seen.Counts = maps.Clone(seen.Counts)

	return seen
}

// Count returns how many fetches of a kind have come.
func (f *Fetches) Count(kind string) int { return f.Seen().Counts[kind] }

// InboxPrefix is what reply subjects of fetches have to begin with.
func (f *Fetches) InboxPrefix() string { return bus.InboxPrefix(f.cfg.Provider) + "." }

// onFetch runs on the subscription's goroutine.
func (f *Fetches) onFetch(m *nats.Msg) {
	subject, err := bus.ParseSubject(m.Subject)
	if err != nil {
		return
	}
	env, err := bus.DecodeMessage(m)
	f.mu.Lock()
	f.seen.Counts[subject.Verb]++
	if !strings.HasPrefix(m.Reply, f.InboxPrefix()) {
		f.seen.Outside = append(f.seen.Outside, m.Reply)
		err = nats.ErrBadSubject
	}
	gate := f.gate
	f.mu.Unlock()
	if err != nil {
		return // as the manager does
	}
	go func() {
		f.wait(gate)
		payload, err := bus.Encode(f.answer(env), bus.ContentTypeOf(m))
		if err == nil {
			_ = f.conn.Publish(m.Reply, payload) // the driver asks again, or fails a check
		}
	}()
}

func (f *Fetches) wait(gate <-chan struct{}) {
	select {
	case <-gate:
		return
	default:
	}
	f.mu.Lock()
	f.seen.Waiting++
	f.mu.Unlock()
	select {
	case <-gate:
	case <-f.ctx.Done():
	}
	f.mu.Lock()
	f.seen.Waiting--
	f.mu.Unlock()
}

func (f *Fetches) answer(env *driverv1.Envelope) *driverv1.Envelope {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch body := env.GetBody().(type) {
	case *driverv1.Envelope_FetchClass:
		return &driverv1.Envelope{Body: &driverv1.Envelope_FetchedClass{FetchedClass: f.class(body.FetchClass)}}
	case *driverv1.Envelope_FetchSecret:
		return &driverv1.Envelope{Body: &driverv1.Envelope_FetchedSecret{FetchedSecret: f.secret(body.FetchSecret)}}
	case *driverv1.Envelope_FetchBootstrap:
		return &driverv1.Envelope{Body: &driverv1.Envelope_FetchedBootstrap{FetchedBootstrap: f.bootstrap(body.FetchBootstrap)}}
	default:
		return &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: &driverv1.Result{
			Status: &driverv1.Status{Code: driverv1.Code_CODE_UNIMPLEMENTED, Message: "no such fetch"},
		}}}
	}
}

func (f *Fetches) class(req *driverv1.FetchClassRequest) *driverv1.FetchClassResponse {
	class := f.cfg.Class
	response := &driverv1.FetchClassResponse{Status: f.refusal(FetchClass)}
	switch {
	case f.answers.NoClass:
		response.Status = &driverv1.Status{
			Code: driverv1.Code_CODE_UNAVAILABLE, Message: "no class at the moment", RetryAfter: durationpb.New(comeAgain),
		}
	case response.Status != nil:
	case req.GetClass().GetNamespace() != class.Namespace || req.GetClass().GetName() != class.Name:
		response.Status = &driverv1.Status{Code: driverv1.Code_CODE_NOT_FOUND, Message: "no such class"}
	default:
		response.Class = &driverv1.Class{
			Reference: f.ref(Reference{class.Namespace, class.Name}, FetchClass), Provider: f.cfg.Provider,
			ProviderSpec: class.ProviderSpec, Labels: class.Labels, Annotations: class.Annotations,
		}
		if f.answers.Spec != nil {
			response.Class.ProviderSpec = f.answers.Spec
		}
	}

	return response
}

// refusal is the status of the fetches that are refused; nil for others.
func (f *Fetches) refusal(kind string) *driverv1.Status {
	if f.answers.Refused != kind {
		return nil
	}

	return &driverv1.Status{Code: f.answers.Code, Message: "the suite refuses this " + kind}
}

func (f *Fetches) secret(req *driverv1.FetchSecretRequest) *driverv1.FetchSecretResponse {
	response := &driverv1.FetchSecretResponse{Status: f.refusal(FetchSecret)}
	ref := Reference{req.GetSecret().GetNamespace(), req.GetSecret().GetName()}
	secret := f.cfg.secretOf(ref)
	if response.Status == nil && secret == nil {
		response.Status = &driverv1.Status{Code: driverv1.Code_CODE_NOT_FOUND, Message: "no such secret"}
	}
	if response.Status != nil {
		return response
	}
	content := &driverv1.SecretContent{Nonce: req.GetNonce(), Reference: f.ref(ref, FetchSecret), Data: secret.Data}
	if f.answers.Secret != nil {
		content.Data = f.answers.Secret
	}
	if f.answers.Nonce {
		content.Nonce = append([]byte("another "), req.GetNonce()...)
	}
	key := f.key
	if f.answers.Seal {
		key = f.forged
	}
	if req.GetRecipient() == "" { // a driver that cannot open seals; this bus is for tests
		response.Unsealed = content
	} else {
		f.seen.Opens = true
		response.Sealed, response.Status = seal(key, content, req.GetRecipient())
	}

	return response
}

func (f *Fetches) bootstrap(req *driverv1.FetchBootstrapRequest) *driverv1.FetchBootstrapResponse {
	response := &driverv1.FetchBootstrapResponse{Status: f.refusal(FetchBootstrap)}
	if response.Status != nil {
		return response
	}
	values := map[string]string{}
	maps.Copy(values, f.cfg.Bootstrap)
	values["<<MACHINE_NAME>>"] = req.GetMachine()
	content := &driverv1.BootstrapContent{Nonce: req.GetNonce(), Values: values}
	if req.GetRecipient() == "" {
		response.Unsealed = content
	} else {
		response.Sealed, response.Status = seal(f.key, content, req.GetRecipient())
	}

	return response
}

func seal(key *bus.SealKey, content proto.Message, recipient string) (*driverv1.Sealed, *driverv1.Status) {
	sealed, err := key.Seal(content, recipient)

	return sealed, bus.StatusOf(err)
}
