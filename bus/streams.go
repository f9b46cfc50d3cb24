package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	// streamCheck is the time between looks whether a stream is still as it
	// should be, streamRetry that between tries to make it.
	streamCheck = 30 * time.Second
	streamRetry = time.Second
	// streamPatience is how long a call waits for the first word on a stream.
	streamPatience = 3 * time.Second
	// absentTries is how often in a row a server must say that it has no
	// JetStream before it is believed: one that starts says so, too.
	absentTries = 3

	maxRecordBytes = 1 << 20
)

// errNoJetStream: the server says that it has none.
var errNoJetStream = errors.New("NATS has no JetStream here")

// A StreamConfig says how operations streams are made. They hold sessions and
// claims: what mcm needs to prove that a silent replica has stopped, and to learn
// of what ended while it was away.
type StreamConfig struct {
	// Replicas is how many servers hold each record; 0 means 1.
	Replicas int
	// Memory keeps records in memory only: they are gone when NATS restarts.
	Memory bool

	first func() uint64 // of a stream's sequences; nil means sequenceAtRandom
}

// A StreamState is how a provider's operations stream is.
type StreamState struct {
	Provider, Name string
	// Ready: operations are claimed, and dead replicas are fenced.
	Ready bool
	// Problem says why it is not ready; empty before that is known.
	Problem string
	// Absent: NATS has no JetStream. Operations are dispatched without claims.
	Absent bool
	// Bytes is how much it held when it was last looked at, and MaxBytes how much it
	// could; 0 before that, and a negative MaxBytes means no limit. A full stream takes
	// nothing: neither claims nor outcomes, nor sessions, so that leases lapse.
	Bytes, MaxBytes int64
}

// streams keeps the operations streams of all providers that are met.
type streams struct {
	c      *Caller
	config StreamConfig

	mu   sync.Mutex
	seen map[string]*stream // by provider
}

type stream struct {
	state  StreamState
	ready  bool          // was, once, in this process: then it is never taken for absent; written by its keeper alone
	room   room          // its keeper's, as are the next two
	full   bool          // it is about to refuse everything, which is logged
	narrow time.Time     // when JetStream had no more room for it; zero if it had
	absent int           // times in a row that the server said so
	known  chan struct{} // closed at the first word on it
	check  chan struct{}
	aging  bool     // somebody asks for its age
	next   *ageLook // who asks next, for all that came meanwhile; nil for nobody
}

// An ageLook is one question for a stream's age that any number of calls wait for.
type ageLook struct {
	done chan struct{}
	age  time.Duration
	err  error
}

// of returns the keeper of a provider's stream, started at the first call.
func (s *streams) of(provider string) *stream {
	s.mu.Lock()
	defer s.mu.Unlock()
	st, ok := s.seen[provider]
	if ok {
		return st
	}
	st = &stream{
		state: StreamState{Provider: provider, Name: StreamName(s.c.cfg.Cluster, provider)},
		known: make(chan struct{}), check: make(chan struct{}, 1),
	}
	s.seen[provider] = st
	s.c.spawn(func() { s.keep(s.c.ctx, st) })

	return st
}

// checkAll looks at all streams at once: the server is another one.
func (s *streams) checkAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, st := range s.seen {
		signal(st.check)
	}
}

func (s *streams) list() []StreamState {
	s.mu.Lock()
	defer s.mu.Unlock()
	states := make([]StreamState, 0, len(s.seen))
	for _, st := range s.seen {
		states = append(states, st.state)
	}
	slices.SortFunc(states, func(a, b StreamState) int { return strings.Compare(a.Provider, b.Provider) })

	return states
}

// keep makes a stream and makes it again when it is gone, until ctx ends.
func (s *streams) keep(ctx context.Context, st *stream) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-st.check:
		}
		next := streamRetry
		if s.c.conn.Up() {
			known := st.ready
			err := s.make(ctx, st)
			if s.note(st, err) && (known || err != nil) { // what it holds is seen once it is as it should be
				next = streamCheck
			}
			if known && err == nil {
				s.weigh(ctx, st)
			}
		}
		timer.Reset(next)
	}
}

// note records how an attempt to make a stream went, and tells people about
// changes. It returns whether the state is settled.
func (s *streams) note(st *stream, err error) (settled bool) {
	s.mu.Lock()
	before := st.state
	if errors.Is(err, errNoJetStream) {
		st.absent++
	} else {
		st.absent = 0
	}
	st.state.Ready, st.state.Problem = err == nil, ""
	st.state.Absent = !st.ready && st.absent >= absentTries
	st.ready = st.ready || err == nil
	st.state.Bytes, st.state.MaxBytes = st.room.bytes, st.room.limit
	if err != nil {
		st.state.Problem = err.Error()
	}
	now := st.state
	// A server that starts says so, too: it is believed, and told, a little later.
	early := errors.Is(err, errNoJetStream) && !st.ready && !now.Absent
	s.mu.Unlock()
	// First the warning, then the operations that it warns of.
	if !early {
		s.tell(before, now)
	}
	if now.Ready || now.Absent {
		select {
		case <-st.known:
		default:
			close(st.known)
		}
	}

	return now.Ready || now.Absent
}

// tell logs what has changed.
func (s *streams) tell(before, now StreamState) {
	log := s.c.log.With("stream", now.Name, "provider", now.Provider)
	switch {
	case now.Ready && !before.Ready:
		log.Info("operations are claimed in the operations stream")
	case now.Absent && !before.Absent:
		log.Warn("NATS has no JetStream: operations go without claims. A replica that is cut off is not fenced, " +
			"outcomes do not outlive their replica, and a lost create of a driver without identity waits for its deadline. " +
			"Switch JetStream on (embedded: --nats-store-dir)")
	case !now.Ready && !now.Absent && before.Problem != now.Problem:
		log.Error("the operations stream is not there: creates and deletes wait", "err", now.Problem)
	}
}

// make creates the stream, or brings an existing one to this configuration when it is
// first met.
func (s *streams) make(ctx context.Context, st *stream) error {
	cluster, provider, name := s.c.cfg.Cluster, st.state.Provider, st.state.Name
	first := s.config.first
	if first == nil {
		first = sequenceAtRandom
	}
	cfg := jetstream.StreamConfig{
		Name:        name,
		Description: "machinebus: sessions of driver replicas and claims on machines",
		Subjects:    []string{wildcard(cluster, TreeSession, provider, "*"), wildcard(cluster, TreeClaim, provider, "*")},
		Storage:     jetstream.FileStorage, Replicas: max(1, s.config.Replicas),
		MaxMsgsPerSubject: 1, MaxBytes: leastStreamBytes, MaxMsgSize: maxRecordBytes, MaxMsgs: -1, MaxConsumers: -1,
		// Old records must never make room for new ones: a claim that went without
		// its owner's knowing would let two replicas at one machine.
		Discard: jetstream.DiscardNew, MaxAge: keptFor,
		AllowDirect: true, AllowMsgTTL: true, DenyPurge: true, DenyDelete: true,
		// Where a stream was lost, its sequences must not come again: somebody may
		// still hold one.
		FirstSeq: first(),
	}
	if s.config.Memory {
		cfg.Storage = jetstream.MemoryStorage
	}
	there, err := s.look(ctx, name)
	if errors.Is(err, errNoStream) {
		s.c.unmark(provider)
		st.room = room{}

		return s.api(ctx, "STREAM.CREATE."+name, cfg)
	}
	if err != nil {
		return err
	}
	st.room = there
	if st.ready {
		return nil
	}
	cfg.FirstSeq = 0
	if cfg.MaxBytes = there.limit; there.limit >= 0 {
		cfg.MaxBytes = max(there.limit, leastStreamBytes)
	}
	if err := s.api(ctx, "STREAM.UPDATE."+name, cfg); err != nil {
		return fmt.Errorf("%w (it exists with settings that cannot be changed: adapt --nats-stream-storage, or delete it when nothing runs)", err)
	}
	st.room.limit = cfg.MaxBytes

	return nil
}

// sequenceAtRandom is where the sequences of a new stream begin: anywhere in a range
// of which a stream uses a billionth in days, so that they meet none of a stream of
// the same name before it. A clock could not tell that: somebody else's may have been
// ahead when the one before was made, or this process be frozen between its look at the
// clock and the request. Below 2^53, which is as far as JavaScript counts.
func sequenceAtRandom() uint64 { return 1 + rand.Uint64N(1<<52) }

// ageOf returns how long a provider's stream has been there, asked of the server after
// ageOf was called. Of many that want to know at a time, one asks for all.
func (s *streams) ageOf(ctx context.Context, provider string) (time.Duration, error) {
	st := s.of(provider)
	s.mu.Lock()
	if st.next == nil {
		st.next = &ageLook{done: make(chan struct{})}
	}
	look := st.next
	if !st.aging {
		st.aging = true
		s.c.spawn(func() { s.askAges(st) })
	}
	s.mu.Unlock()
	select {
	case <-look.done:
		return look.age, look.err
	case <-s.c.ctx.Done():
		return 0, s.c.ctx.Err() //nolint:wrapcheck // closed
	case <-ctx.Done():
		return 0, ctx.Err() //nolint:wrapcheck // the caller's own
	}
}

// askAges asks for a stream's age for as long as somebody wants to know it.
func (s *streams) askAges(st *stream) {
	for {
		s.mu.Lock()
		look := st.next
		st.next, st.aging = nil, look != nil
		s.mu.Unlock()
		if look == nil {
			return
		}
		look.age, look.err = s.age(s.c.ctx, st.state.Name)
		close(look.done)
	}
}

// age returns how long a stream has been there, by the server's clock alone.
func (s *streams) age(ctx context.Context, name string) (time.Duration, error) {
	var info struct {
		Created time.Time `json:"created"`
		Now     time.Time `json:"ts"`
	}
	if err := s.request(ctx, "STREAM.INFO."+name, nil, &info); err != nil {
		return 0, err
	}

	return info.Now.Sub(info.Created), nil
}

// api makes a request of JetStream's API.
func (s *streams) api(ctx context.Context, what string, body any) error {
	return s.request(ctx, what, body, nil)
}

// request is api that reads the answer into what is not nil.
func (s *streams) request(ctx context.Context, what string, body, into any) error {
	var payload []byte
	if body != nil {
		var err error
		if payload, err = json.Marshal(body); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	const limit = 5 * ledgerTimeout // a cluster has to agree on it
	answer, err := s.c.inquirer.ask(ctx, &nats.Msg{Subject: "$JS.API." + what, Data: payload}, limit)
	if errors.Is(err, errNoAnswer) {
		return fmt.Errorf("%s: %w: may this user publish to $JS.API.%s?", what, err, what)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if isNoResponders(answer) {
		return errNoJetStream
	}
	var reply struct {
		Error *apiError `json:"error"`
	}
	if err := json.Unmarshal(answer.Data, &reply); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if reply.Error != nil {
		return fmt.Errorf("%s: %w", what, reply.Error)
	}
	if into == nil {
		return nil
	}
	if err := json.Unmarshal(answer.Data, into); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}

	return nil
}

// claims tells whether operations of a provider are to be claimed. The error says
// why that cannot be told, or cannot be done, at this moment.
func (c *Caller) claims(ctx context.Context, provider string) (bool, error) {
	if c.streams == nil {
		return false, nil
	}
	st := c.streams.of(provider)
	select {
	case <-st.known:
	default:
		limit := time.NewTimer(streamPatience)
		defer limit.Stop()
		select {
		case <-st.known:
		case <-limit.C:
		case <-ctx.Done():
			return false, ctx.Err() //nolint:wrapcheck // the caller's own
		}
	}
	c.streams.mu.Lock()
	state := st.state
	c.streams.mu.Unlock()
	if state.Ready || state.Absent {
		return state.Ready, nil
	}

	return false, fmt.Errorf("operations stream %s is not there: %s", state.Name, state.Problem)
}

// lost has a stream looked at that did not do as it should.
func (c *Caller) lost(provider string, err error) {
	if c.streams != nil && err != nil {
		signal(c.streams.of(provider).check)
	}
}

// Streams returns how the operations streams of the providers met so far are.
func (c *Caller) Streams() []StreamState {
	if c.streams == nil {
		return nil
	}

	return c.streams.list()
}

func (c *Caller) ledger(provider string) ledger {
	return ledger{inquirer: c.inquirer, stream: StreamName(c.cfg.Cluster, provider)}
}
