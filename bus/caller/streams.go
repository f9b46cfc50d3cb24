package caller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/opstream"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// streamCheck is the time between looks whether a stream is still as it should
	// be and takes writes, streamRetry that between tries to make it.
	streamCheck = 5 * time.Second
	streamRetry = time.Second
	// apiTimeout is how long JetStream may take to agree on something among servers.
	apiTimeout = 5 * opstream.AnswerTimeout
	// streamPatience is how long a call waits for the first word on a stream.
	streamPatience = 3 * time.Second
)

// errReadsOnly: the Caller was made without operations streams.
var errReadsOnly = errors.New("this Caller only reads: set CallerConfig.Operations to let it claim machines")

// A StreamConfig says how operations streams are made. They hold claims: what keeps two
// replicas from one machine, and what mcm learns from of what ended while it was away.
type StreamConfig struct {
	// Replicas is how many servers hold each record; 0 means 1.
	Replicas int
	// Memory keeps records in memory only: they are gone when NATS restarts.
	Memory bool
	// Stuck is called each time that a stream has not taken a write, with the cause: it
	// restarts a server that can write to its disk again, or returns why that does not
	// help yet. It may block. May be nil.
	Stuck func(cause error) error

	first func() uint64 // of a stream's sequences; nil means sequenceAtRandom
}

// A StreamState is how a provider's operations stream is.
type StreamState struct {
	Provider, Name string
	// Ready: it has taken a write at the last look.
	Ready bool
	// Problem says why it is not ready; empty before that is known.
	Problem string
	// Bytes is how much it held when it was last looked at, and MaxBytes how much it
	// could; 0 before that, and a negative MaxBytes means no limit. A full stream takes
	// nothing, neither claims nor outcomes.
	Bytes, MaxBytes int64
	// Leader: one of the servers that hold it leads them. Behind is how many of the
	// others are offline or do not have all that it has.
	Leader bool
	Behind int
	// Rollbacks is how often it was found without records that it had acknowledged.
	Rollbacks uint64
}

// streams keeps the operations streams of all providers that are met.
type streams struct {
	c      *Caller
	config StreamConfig

	mu   sync.Mutex
	seen map[string]*stream // by provider
}

type stream struct {
	state         StreamState
	ready         bool       // was, once, in this process; written by its keeper alone
	room          streamInfo // its keeper's, as are the next two
	nearlyFull    bool       // it is about to refuse everything, which is logged
	raiseFailedAt time.Time  // when JetStream had no more room for it; zero if it had
	newest        uint64     // sequence that the stream has told, or acknowledged; its keeper's
	// rolledFrom is what newest was when the last rollback was noticed.
	rolledFrom uint64
	// Guarded by streams.mu:
	rolledBackAt time.Time          // when it was last found rolled back
	made         time.Time          // when it was made, by its server's clock
	reported     uint64             // highest sequence of it that a replica had acknowledged
	cancelLook   context.CancelFunc // ends the look at it that is under way, if one is
	reportedAt   time.Time          // when it was last looked at for that

	// Its keeper's:
	suspectSince time.Time                  // since when it seems to be rolled back
	goneSince    time.Time                  // since when it is not there any more; zero while it is
	settings     map[string]json.RawMessage // to make it again with; nil for the usual ones
	unanswered   int                        // writes in a row that got no answer; its keeper's
	firstLook    chan struct{}              // closed when it is ready for the first time
	recheck      chan struct{}
	askingAge    bool     // somebody asks for its age
	nextAge      *ageLook // who asks next, for all that came meanwhile; nil for nobody
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
		state:     StreamState{Provider: provider, Name: bus.StreamName(s.c.cfg.Cluster, provider)},
		firstLook: make(chan struct{}), recheck: make(chan struct{}, 1),
	}
	s.seen[provider] = st
	s.c.spawn(func() { s.keepStream(s.c.ctx, st) })

	return st
}

// checkAll looks at all streams at once: the connection was made again. What was asked
// before that gets no answer any more.
func (s *streams) checkAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, st := range s.seen {
		signal(st.recheck)
		if st.cancelLook != nil {
			st.cancelLook()
		}
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

// keepStream makes a stream and makes it again when it is gone, until ctx ends.
func (s *streams) keepStream(ctx context.Context, st *stream) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-st.recheck:
		}
		next := streamRetry
		if s.c.conn.Up() {
			known := st.ready
			look, giveUp := context.WithCancel(ctx)
			s.mu.Lock()
			st.cancelLook = giveUp
			s.mu.Unlock()
			err := s.ensureStream(look, st)
			if err == nil {
				err = s.probe(look, st)
			}
			stale := look.Err() != nil
			giveUp()
			switch {
			case ctx.Err() != nil:
				return
			case stale:
				continue // there is a check to do
			}
			if s.recordState(st, err) && (known || err != nil) { // what it holds is seen once it is as it should be
				next = streamCheck
			}
			if known && err == nil {
				s.checkSize(ctx, st)
			}
		}
		timer.Reset(next)
	}
}

// recordState records how an attempt to make a stream went, and tells people about
// changes. It returns whether the state is settled.
func (s *streams) recordState(st *stream, err error) (settled bool) {
	s.mu.Lock()
	before := st.state
	st.state.Ready, st.state.Problem = err == nil, ""
	st.ready = st.ready || err == nil
	st.state.Bytes, st.state.MaxBytes = st.room.bytes, st.room.limit
	st.state.Leader, st.state.Behind = st.room.hasLeader, st.room.lagging
	if err != nil {
		st.state.Problem = err.Error()
	}
	now := st.state
	s.mu.Unlock()
	s.logChanges(before, now)
	if now.Ready {
		select {
		case <-st.firstLook:
		default:
			close(st.firstLook)
		}
	}

	return now.Ready
}

// logChanges logs what has changed.
func (s *streams) logChanges(before, now StreamState) {
	log := s.c.log.With("stream", now.Name, "provider", now.Provider)
	switch {
	case now.Ready && !before.Ready:
		log.Info("the operations stream takes claims")
	case !now.Ready && before.Problem != now.Problem:
		log.Error("the operations stream is not usable: creates and deletes wait", "err", now.Problem)
	}
}

// ensureStream creates the stream, or brings an existing one to this configuration when it is
// first met.
func (s *streams) ensureStream(ctx context.Context, st *stream) error {
	cluster, provider, name := s.c.cfg.Cluster, st.state.Provider, st.state.Name
	first := s.config.first
	if first == nil {
		first = sequenceAtRandom
	}
	cfg := jetstream.StreamConfig{
		Name:        name,
		Description: "machinebus: claims on machines",
		Subjects:    []string{bus.Pattern(cluster, bus.TreeClaim, provider, "*")},
		Storage:     jetstream.FileStorage, Replicas: max(1, s.config.Replicas),
		MaxMsgsPerSubject: 1, MaxBytes: leastStreamBytes, MaxMsgSize: opstream.MaxRecordBytes, MaxMsgs: -1, MaxConsumers: -1,
		// Old records must never make room for new ones: a claim that went without
		// its owner's knowing would let two replicas at one machine.
		Discard: jetstream.DiscardNew, MaxAge: opstream.KeptFor,
		AllowDirect: true, AllowMsgTTL: true, DenyPurge: true, DenyDelete: true,
		// Where a stream was lost, its sequences must not come again: somebody may
		// still hold one.
		FirstSeq: first(),
	}
	if s.config.Memory {
		cfg.Storage = jetstream.MemoryStorage
	}
	known := s.acknowledgedState(st) // before the look
	there, err := s.readStream(ctx, name)
	if err == nil && s.lacksRecords(st, there, known) {
		err = s.rolledBack(ctx, st, there)
	}
	st.room.hasLeader, st.room.lagging = false, 0
	if errors.Is(err, opstream.ErrNoStream) {
		return s.createStream(ctx, st, cfg)
	}
	st.goneSince = time.Time{}
	if err != nil {
		return err
	}
	st.newest = max(st.newest, there.last)
	st.room = there
	if st.ready {
		return nil
	}
	cfg.FirstSeq = 0
	if cfg.MaxBytes = there.limit; there.limit >= 0 {
		cfg.MaxBytes = max(there.limit, leastStreamBytes)
	}
	settings, err := overlaySettings(there.config, cfg)
	if err == nil {
		err = s.apiRequest(ctx, "STREAM.UPDATE."+name, settings)
	}
	switch {
	case isDiskFull(err):
		return s.writeError(st, err)
	case err != nil:
		return fmt.Errorf("%w (it exists with settings that cannot be changed: adapt --nats-stream-storage, or delete it when nothing runs)", err)
	}
	st.room.limit = cfg.MaxBytes

	return nil
}

// createStream makes a stream. One that has to be made again keeps what people have set. It comes
// once the requests from before are stale: a first attempt's claim fits into any new
// stream, and one that was on its way for long would begin beside what came after it.
func (s *streams) createStream(ctx context.Context, st *stream, cfg jetstream.StreamConfig) error {
	st.room, st.newest = streamInfo{}, 0
	if st.ready && st.goneSince.IsZero() {
		st.goneSince = time.Now()
	}
	if wait := bus.AcceptBy - time.Since(st.goneSince); wait > 0 {
		return fmt.Errorf("it was deleted: mcm makes it again in %s, once older requests are stale", wait.Round(time.Millisecond))
	}
	settings, err := overlaySettings(st.settings, cfg)
	if err == nil {
		err = s.apiRequest(ctx, "STREAM.CREATE."+st.state.Name, settings)
	}
	st.room.hasLeader = err == nil
	switch {
	case err == nil:
		st.settings = nil
	case isDiskFull(err):
		return s.writeError(st, err)
	case !errors.Is(err, opstream.ErrNoAnswer):
		st.settings = nil // they may be why
	}

	return err
}

// overlaySettings returns what people have set of a stream, with what has to be as cfg says.
func overlaySettings(there map[string]json.RawMessage, cfg jetstream.StreamConfig) (map[string]json.RawMessage, error) {
	settings := map[string]json.RawMessage{}
	maps.Copy(settings, there)
	own, err := json.Marshal(cfg)
	if err == nil {
		err = json.Unmarshal(own, &settings)
	}
	if err != nil {
		return nil, fmt.Errorf("settings of stream %s: %w", cfg.Name, err)
	}

	return settings, nil
}

// errRolledBackStandby is for a manager that does not lead.
var errRolledBackStandby = errors.New("it was rolled back: the leading manager will make it again")

// madeAt returns when a provider's stream was made; nil while that is not known, and of a
// Caller that only reads.
func (s *streams) madeAt(provider string) *timestamppb.Timestamp {
	if s == nil {
		return nil
	}
	st := s.of(provider)
	s.mu.Lock()
	defer s.mu.Unlock()
	if st.made.IsZero() {
		return nil
	}

	return timestamppb.New(st.made)
}

// reportEvery is the least time between two looks at a stream for what replicas report.
const reportEvery = time.Second

// noteReported takes what a replica says of the highest sequence that it had acknowledged. The
// stream is looked at for that, as it may have been rolled back while no manager ran.
func (s *streams) noteReported(st *stream, session *driverv1.Session) {
	made, sequence := session.GetClaimStreamMade(), session.GetClaimSequence()
	if sequence == 0 || !made.IsValid() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !made.AsTime().Equal(st.made) || sequence <= st.reported {
		return
	}
	st.reported = sequence
	if now := time.Now(); now.Sub(st.reportedAt) >= reportEvery {
		st.reportedAt = now
		signal(st.recheck)
	}
}

// acknowledgedState returns what a stream has to have: that which was made at some time, a sequence
// that it has acknowledged to a replica or to this manager.
func (s *streams) acknowledgedState(st *stream) (least streamInfo) {
	s.mu.Lock()
	defer s.mu.Unlock()

	return streamInfo{made: st.made, last: max(st.newest, st.reported)}
}

// removeRolledBack deletes a stream that was rolled back: its sequences come again, and a replica
// may still hold one. It returns ErrNoStream when that is done. Only the manager that leads
// does so, as the stream may be one that another manager has just made.
func (s *streams) removeRolledBack(ctx context.Context, st *stream, seen streamInfo) error {
	name := st.state.Name
	if !s.c.leads() {
		return errRolledBackStandby
	}
	there, err := s.readStream(ctx, name)
	switch {
	case err != nil:
		return err
	case !there.made.Equal(seen.made):
		return errors.New("it was rolled back and has been made again: checking again")
	}
	if err := s.apiRequest(ctx, "STREAM.DELETE."+name, nil); err != nil {
		return fmt.Errorf("it was rolled back and must be made again: %w (delete it, or allow mcm to delete it)", err)
	}
	st.settings = seen.config

	return opstream.ErrNoStream
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
	if st.nextAge == nil {
		st.nextAge = &ageLook{done: make(chan struct{})}
	}
	look := st.nextAge
	if !st.askingAge {
		st.askingAge = true
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
		look := st.nextAge
		st.nextAge, st.askingAge = nil, look != nil
		s.mu.Unlock()
		if look == nil {
			return
		}
		look.age, look.err = s.age(s.c.ctx, st)
		close(look.done)
	}
}

// age returns for how long a stream has had all its records, as far as is known: since
// it was made, by the server's clock alone, unless it was rolled back since, or may have
// been. A server can lose what it has acknowledged only by starting again, which ends
// connections.
func (s *streams) age(ctx context.Context, st *stream) (time.Duration, error) {
	name := st.state.Name
	var info struct {
		Created time.Time `json:"created"`
		Now     time.Time `json:"ts"`
	}
	if err := s.apiRequestInto(ctx, "STREAM.INFO."+name, nil, &info); err != nil {
		return 0, err
	}

	s.mu.Lock()
	whole := st.rolledBackAt
	s.mu.Unlock()
	if back := s.c.restart.Load(); back != nil {
		whole = later(whole, *back)
	}

	return min(info.Now.Sub(info.Created), time.Since(whole)), nil
}

// lacksRecords reports whether a stream has lost records that it has acknowledged: its
// server was put back to an older state, or has lost what was not on its disk yet.
func (s *streams) lacksRecords(st *stream, there, known streamInfo) bool {
	switch {
	case !there.made.Equal(known.made): // another stream, or the first one
		st.newest = 0
		s.mu.Lock()
		st.made, st.reported = there.made, 0
		s.mu.Unlock()
	case there.last < known.last:
		st.newest = known.last

		return true
	}
	st.suspectSince = time.Time{}

	return false
}

// staleLeader is more than a server leads others for that it has lost: until then it
// answers for a stream without the newest records.
const staleLeader = 15 * time.Second

// rolledBack has a stream made again that lacks records.
func (s *streams) rolledBack(ctx context.Context, st *stream, there streamInfo) error {
	if st.suspectSince.IsZero() {
		st.suspectSince = time.Now()
	}
	if there.replicated && time.Since(st.suspectSince) < staleLeader {
		return errors.New("it lacks acknowledged records: it was rolled back, or its leader has lost the other servers; checking again")
	}
	if st.newest != st.rolledFrom { // else it is the same one, which could not be made again yet
		st.rolledFrom = st.newest
		s.c.log.Error("the operations stream was rolled back: acknowledged records are gone. The outcome of running operations counts as unknown, "+
			"and the next attempt looks for what they made. Set sync_interval: always in NATS, and restore no old copy of its store",
			"stream", st.state.Name, "provider", st.state.Provider, "sequence", there.last, "acknowledged", st.newest)
		s.mu.Lock()
		st.rolledBackAt = time.Now()
		st.state.Rollbacks++
		s.mu.Unlock()
	}

	return s.removeRolledBack(ctx, st, there)
}

// apiRequest makes a request of JetStream's API.
func (s *streams) apiRequest(ctx context.Context, what string, body any) error {
	return s.apiRequestInto(ctx, what, body, nil)
}

// apiRequestInto is api that reads the answer into what is not nil.
func (s *streams) apiRequestInto(ctx context.Context, what string, body, into any) error {
	var payload []byte
	if body != nil {
		var err error
		if payload, err = json.Marshal(body); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	answer, err := s.c.inquirer.Ask(ctx, &nats.Msg{Subject: "$JS.API." + what, Data: payload}, apiTimeout)
	if errors.Is(err, opstream.ErrNoAnswer) {
		return fmt.Errorf("%s: %w: check that this user may publish to $JS.API.%s", what, err, what)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if bus.IsNoResponders(answer) {
		return opstream.ErrNoJetStream
	}
	var reply struct {
		Error *opstream.APIError `json:"error"`
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

// awaitStream returns when operations of a provider can be claimed. The error says why
// they cannot at this moment.
func (c *Caller) awaitStream(ctx context.Context, provider string) error {
	st := c.streams.of(provider)
	select {
	case <-st.firstLook:
	default:
		limit := time.NewTimer(streamPatience)
		defer limit.Stop()
		select {
		case <-st.firstLook:
		case <-limit.C:
		case <-ctx.Done():
			return ctx.Err() //nolint:wrapcheck // the caller's own
		}
	}
	c.streams.mu.Lock()
	state := st.state
	c.streams.mu.Unlock()
	if state.Ready {
		return nil
	}
	if err := state.fault(); err != nil {
		return err
	}

	return fmt.Errorf("operations stream %s does not exist yet", state.Name)
}

// recheckStream has a stream looked at that did not do as it should.
func (c *Caller) recheckStream(provider string, err error) {
	if c.streams != nil && err != nil {
		signal(c.streams.of(provider).recheck)
	}
}

// Streams returns how the operations streams of the providers met so far are.
func (c *Caller) Streams() []StreamState {
	if c.streams == nil {
		return nil
	}

	return c.streams.list()
}

func (c *Caller) ledger(provider string) opstream.Ledger {
	return opstream.Ledger{Inquirer: c.inquirer, Stream: bus.StreamName(c.cfg.Cluster, provider)}
}
