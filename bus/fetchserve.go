package bus

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A FetchHandler answers the fetches of drivers. Methods are called from many
// goroutines; provider is the one whose driver asks, as NATS's permissions vouch
// for, and a method must check that the thing is that provider's. An error
// travels as its code and text.
type FetchHandler interface {
	Class(ctx context.Context, provider string, req *driverv1.FetchClassRequest) (*driverv1.Class, error)
	Secret(ctx context.Context, provider string, req *driverv1.FetchSecretRequest) (*driverv1.SecretContent, error)
	Bootstrap(ctx context.Context, provider string, req *driverv1.FetchBootstrapRequest) (*driverv1.BootstrapContent, error)
}

const (
	// fetchesAtOnce are answered at the same time, fetchesOfOne of them for one provider,
	// of which fetchesWaiting more may wait: as many as a replica has slots by default.
	fetchesAtOnce, fetchesOfOne, fetchesWaiting = 64, 16, 496
	// maxFetch is more than any fetch has bytes.
	maxFetch      = 64 << 10
	answerTimeout = 5 * time.Second
)

// A FetchServer answers fetches until it is stopped.
type FetchServer struct {
	conn     *Conn
	key      *SealKey
	handler  FetchHandler
	unsealed []string
	log      *slog.Logger
	sub      Subscription
	slots    chan struct{}
	halt     chan struct{} // closed by Stop
	dropped  atomic.Uint64

	mu      sync.Mutex
	stopped bool
	lanes   map[string]*fetchLane // by provider
	running sync.WaitGroup        // added to under mu while not stopped
}

// ServeFetches answers the fetches of one control plane, together with its
// other replicas, sealing secrets with key. Drivers of the providers in unsealed
// get secrets readable when they say that they cannot open seals, provided that
// the bus is encrypted; everybody else who asks so is refused.
func ServeFetches(
	conn *Conn, cluster string, key *SealKey, handler FetchHandler, log *slog.Logger, unsealed ...string,
) (*FetchServer, error) {
	if err := ValidToken("cluster", cluster); err != nil {
		return nil, err
	}
	if log == nil {
		log = slog.Default()
	}
	s := &FetchServer{
		conn: conn, key: key, handler: handler, unsealed: unsealed, log: log,
		slots: make(chan struct{}, fetchesAtOnce), halt: make(chan struct{}), lanes: map[string]*fetchLane{},
	}
	var err error
	if s.sub, err = conn.Subscribe(Pattern(cluster, TreeFetch, "*", "*"), fetchQueue, s.onFetch); err != nil {
		return nil, err
	}

	return s, nil
}

// Stop takes no more fetches and waits for those being answered. It may be
// called once.
func (s *FetchServer) Stop() {
	_ = s.sub.Unsubscribe() // fails only on a closed connection
	s.mu.Lock()
	s.stopped = true
	s.mu.Unlock()
	close(s.halt)
	s.running.Wait()
}

// Dropped counts the fetches that were not answered because they could not be
// read, because their answer would have gone where the asker has no business, or
// because hundreds of their provider waited already.
func (s *FetchServer) Dropped() uint64 { return s.dropped.Load() }

func (s *FetchServer) onFetch(m *nats.Msg) {
	subject, err := ParseSubject(m.Subject)
	if err != nil {
		return
	}
	// Anything else would let a driver have the manager publish in its name
	// [FETCH-1].
	if !strings.HasPrefix(m.Reply, InboxPrefix(subject.Provider)+".") {
		s.dropped.Add(1)
		s.log.Warn("fetch dropped: its reply subject is not below the provider's inbox prefix",
			"subject", m.Subject, "reply", m.Reply)

		return
	}
	if len(m.Data) > maxFetch {
		s.dropped.Add(1)
		s.log.Warn("fetch dropped: the request is too large", "subject", m.Subject, "bytes", len(m.Data))

		return
	}
	env, err := DecodeMessage(m)
	if err != nil {
		s.dropped.Add(1)
		s.log.Warn("fetch dropped: payload is no envelope", "subject", m.Subject, "err", err)

		return
	}
	s.admit(subject.Provider, func() {
		ctx, cancel := context.WithTimeout(context.Background(), answerTimeout) //nolint:forbidigo // Stop waits for it
		defer cancel()
		s.reply(m, s.fetch(ctx, subject, env))
	})
}

func (s *FetchServer) fetch(ctx context.Context, subject Subject, env *driverv1.Envelope) *driverv1.Envelope {
	provider := subject.Provider
	switch body := env.GetBody().(type) {
	case *driverv1.Envelope_FetchClass:
		class, err := s.handler.Class(ctx, provider, body.FetchClass)

		return &driverv1.Envelope{Body: &driverv1.Envelope_FetchedClass{
			FetchedClass: &driverv1.FetchClassResponse{Status: StatusOf(err), Class: class},
		}}
	case *driverv1.Envelope_FetchSecret:
		req, response := body.FetchSecret, &driverv1.FetchSecretResponse{}
		response.Sealed, response.Unsealed, response.Status = deliver(s, provider, req.GetRecipient(), func() (*driverv1.SecretContent, error) {
			found, err := s.handler.Secret(ctx, provider, req)

			// A copy: the handler may give the same one to many.
			return &driverv1.SecretContent{Nonce: req.GetNonce(), Reference: found.GetReference(), Data: found.GetData()}, err
		})

		return &driverv1.Envelope{Body: &driverv1.Envelope_FetchedSecret{FetchedSecret: response}}
	case *driverv1.Envelope_FetchBootstrap:
		req, response := body.FetchBootstrap, &driverv1.FetchBootstrapResponse{}
		response.Sealed, response.Unsealed, response.Status = deliver(s, provider, req.GetRecipient(), func() (*driverv1.BootstrapContent, error) {
			found, err := s.handler.Bootstrap(ctx, provider, req)

			return &driverv1.BootstrapContent{Nonce: req.GetNonce(), Values: found.GetValues()}, err
		})

		return &driverv1.Envelope{Body: &driverv1.Envelope_FetchedBootstrap{FetchedBootstrap: response}}
	default:
		return ResultFrame(Failure(driverv1.Code_CODE_UNIMPLEMENTED, "this manager serves no fetch "+subject.Verb))
	}
}

// deliver seals what find returns for the recipient, or leaves it unsealed where that is allowed.
func deliver[M proto.Message](s *FetchServer, provider, recipient string, find func() (M, error)) (sealed *driverv1.Sealed, unsealed M, _ *driverv1.Status) {
	open, err := s.mayOpen(provider, recipient)
	if err != nil {
		return nil, unsealed, StatusOf(err)
	}
	content, err := find()
	switch {
	case err != nil:
		return nil, unsealed, StatusOf(err)
	case open:
		return nil, content, StatusOf(nil)
	}
	sealed, err = s.key.Seal(content, recipient)

	return sealed, unsealed, StatusOf(err)
}

// mayOpen reports whether to send an answer unsealed. The driver must name no key, the
// operator must allow it, and NATS must require TLS [FETCH-4].
func (s *FetchServer) mayOpen(provider, recipient string) (bool, error) {
	switch {
	case recipient != "":
		return false, nil
	case !slices.Contains(s.unsealed, provider):
		return false, Errorf(driverv1.Code_CODE_PERMISSION_DENIED, "the request has no key to seal the answer for, "+
			"and unsealed answers are not allowed for provider %s (mcm's --unsealed-providers)", provider)
	case !s.conn.Encrypted():
		return false, Errorf(driverv1.Code_CODE_PERMISSION_DENIED,
			"unsealed answers for provider %s are allowed over TLS only, and this NATS does not require TLS", provider)
	default:
		return true, nil
	}
}

func (s *FetchServer) reply(m *nats.Msg, env *driverv1.Envelope) {
	payload, err := Encode(env, ContentTypeOf(m))
	if err == nil {
		err = s.conn.Publish(&nats.Msg{Subject: m.Reply, Data: payload})
	}
	if err == nil {
		return
	}
	s.log.Warn("fetch not answered", "subject", m.Subject, "err", err)
	// A class or secret too large for the bus must be an error that the driver
	// can show, not a silence.
	if small, encErr := Encode(ResultFrame(Failure(driverv1.Code_CODE_OUT_OF_RANGE, err.Error())), ContentTypeOf(m)); encErr == nil {
		_ = s.conn.Publish(&nats.Msg{Subject: m.Reply, Data: small}) // best effort; the asker times out otherwise
	}
}
