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

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/opstream"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// streamCheck is the time between checks of a stream, streamRetry that between tries
	// to make it.
	streamCheck = 5 * time.Second
	streamRetry = time.Second
	// apiTimeout allows JetStream servers to agree among each other.
	apiTimeout = 5 * opstream.AnswerTimeout
	// streamPatience is how long a call waits for the first check of a stream.
	streamPatience = 3 * time.Second
)

// errReadsOnly is the error of mutations of a Caller without operations streams.
var errReadsOnly = errors.New("this Caller only reads: set CallerConfig.Operations to let it claim machines")

// A StreamConfig configures operations streams. They hold the claims, which keep two
// replicas from one machine and show mcm what ended while it was away.
type StreamConfig struct {
	// Replicas is the number of servers that hold each record; 0 means 1.
	Replicas int
	// Memory keeps records in memory only: a restart of NATS loses them.
	Memory bool
	// Stuck is called with the cause each time a stream has not taken a write. It restarts
	// a server whose disk has space again, or returns why that does not help yet. It may
	// block, and may be nil.
	Stuck func(cause error) error

	first func() uint64 // returns a new stream's first sequence; nil means sequenceAtRandom
}

// A StreamState is the state of a provider's operations stream.
type StreamState struct {
	Provider, Name string
	// Ready: it took a write at the last check.
	Ready bool
	// Problem says why it is not ready; empty before the first check.
	Problem string
	// Bytes is its size at the last check and MaxBytes its limit; 0 before the first
	// check. A negative MaxBytes means no limit. A full stream takes neither claims nor
	// outcomes.
	Bytes, MaxBytes int64
	// Leader: its servers have a leader. Behind is the number of the others that are
	// offline or lag.
	Leader bool
	Behind int
	// Rollbacks counts how often acknowledged records were missing.
	Rollbacks uint64
}

// streams keeps the operations streams of all known providers.
type streams struct {
	c      *Caller
	config StreamConfig

	mu   sync.Mutex
	seen map[string]*stream // by provider
}

type stream struct {
	state         StreamState
	ready         bool       // it was ready once in this process; only its keeper writes this
	room          streamInfo // its keeper's, as are the next three
	nearlyFull    bool       // it is nearly full, which was logged
	raiseFailedAt time.Time  // when its limit could not be raised; zero if it could
	newest        uint64     // highest sequence that the stream has reported or acknowledged
	// rolledFrom is the value of newest when the last rollback was noticed.
	rolledFrom uint64
	// Guarded by streams.mu:
	rolledBackAt time.Time          // when it was last found rolled back
	made         time.Time          // when it was made, by its server's clock
	reported     uint64             // highest sequence that was acknowledged to a replica
	cancelLook   context.CancelFunc // cancels the running check; nil if there is none
	reportedAt   time.Time          // when reported last caused a check

	// Its keeper's:
	suspectSince time.Time                  // since when it appears rolled back
	goneSince    time.Time                  // since when it does not exist; zero while it does
	settings     map[string]json.RawMessage // to make it again with; nil for the defaults
	unanswered   int                        // number of writes in a row without an answer
	firstLook    chan struct{}              // closed once it is ready for the first time
	recheck      chan struct{}
	askingAge    bool     // a goroutine asks for its age
	nextAge      *ageLook // the next question, for calls that came after the current one; nil for none
}

// An ageLook is one question for a stream's age, for which any number of calls wait.
type ageLook struct {
	done chan struct{}
	age  time.Duration
	err  error
}

// of returns a provider's stream and starts its keeper at the first call.
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

// checkAll checks all streams at once after a reconnect. Requests from before get no
// answer.
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

// keepStream makes a stream, and makes it again once it does not exist, until ctx ends.
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
				continue // another check is due
			}
			if s.recordState(st, err) && (known || err != nil) { // the first check after creation reads its size
				next = streamCheck
			}
			if known && err == nil {
				s.checkSize(ctx, st)
			}
		}
		timer.Reset(next)
	}
}

// recordState records the result of a check and logs changes. It reports whether the
// stream is ready.
func (s *streams) recordState(st *stream, err error) (ready bool) {
	s.mu.Lock()
	before := st.state
	st.state.Ready, st.state.Problem = err == nil, ""
	st.state.Bytes, st.state.MaxBytes = st.room.bytes, st.room.limit
	st.state.Leader, st.state.Behind = st.room.hasLeader, st.room.lagging
	if err != nil {
		st.state.Problem = err.Error()
	} else if !st.ready {
		st.ready = true
		close(st.firstLook)
	}
	now := st.state
	s.mu.Unlock()
	s.logChanges(before, now)

	return now.Ready
}

// logChanges logs a change of a stream's state.
func (s *streams) logChanges(before, now StreamState) {
	log := s.c.log.With("stream", now.Name, "provider", now.Provider)
	switch {
	case now.Ready && !before.Ready:
		log.Info("the operations stream takes claims")
	case !now.Ready && before.Problem != now.Problem:
		log.Error("the operations stream is not usable: creates and deletes wait", "err", now.Problem)
	}
}

// ensureStream creates the stream, or updates the configuration of an existing one at the
// first check.
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
		// New records must not evict old ones: a claim that vanishes unnoticed would let two
		// replicas work on one machine.
		Discard: jetstream.DiscardNew, MaxAge: opstream.KeptFor,
		AllowDirect: true, AllowMsgTTL: true, DenyPurge: true, DenyDelete: true,
		// The sequences of a lost stream must not come again: a replica may still expect one.
		FirstSeq: first(),
	}
	if s.config.Memory {
		cfg.Storage = jetstream.MemoryStorage
	}
	known := s.acknowledgedState(st) // before the read
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
		err = s.apiRequest(ctx, "STREAM.UPDATE."+name, settings, nil)
	}
	switch {
	case isDiskFull(err):
		return s.writeError(st, err)
	case err != nil:
		return fmt.Errorf("%w (it exists with settings that NATS does not change: set --nats-stream-storage as it was; to change it, stop mcm and all drivers, "+
			"wait for the operation timeout, delete the stream with nats stream rm, and start them again)", err)
	}
	st.room.limit = cfg.MaxBytes

	return nil
}

// createStream makes a stream. One that is made again keeps settings changed by hand. It
// is made only once older requests are stale: a first attempt's claim fits into any new
// stream, so a delayed request would begin beside a later attempt.
func (s *streams) createStream(ctx context.Context, st *stream, cfg jetstream.StreamConfig) error {
	st.room, st.newest = streamInfo{}, 0
	if st.ready && st.goneSince.IsZero() {
		st.goneSince = time.Now()
	}
	if wait := bus.AcceptBy - time.Since(st.goneSince); wait > 0 {
		return fmt.Errorf("it was deleted: mcm makes it again in %s, once older requests are stale", wait.Round(time.Millisecond))
	}
	if !st.goneSince.IsZero() && !s.c.leads() {
		// The leader may have noted the settings that people made. A manager that has just started
		// does not know of the earlier stream, and makes one all the same.
		return errors.New("it was deleted: the leading manager makes it again")
	}
	settings, err := overlaySettings(st.settings, cfg)
	if err == nil {
		err = s.apiRequest(ctx, "STREAM.CREATE."+st.state.Name, settings, nil)
	}
	st.room.hasLeader = err == nil
	if isDiskFull(err) {
		return s.writeError(st, err)
	}
	if _, refused := errors.AsType[*opstream.APIError](err); err == nil || refused {
		st.settings = nil // they may be the cause of a refusal
	}

	return err
}

// overlaySettings returns a stream's settings, overridden by those in cfg.
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

// madeAt returns when a provider's stream was made; nil if that is not known, or for a
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

// reportEvery is the least time between two checks of a stream for sequences that replicas
// report.
const reportEvery = time.Second

// noteReported notes the highest sequence that was acknowledged to a replica. A higher one
// causes a check: the stream may have been rolled back while no manager ran.
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

// acknowledgedState returns the time at which the stream was made and the highest sequence
// that it has acknowledged to a replica or to this manager.
func (s *streams) acknowledgedState(st *stream) (least streamInfo) {
	s.mu.Lock()
	defer s.mu.Unlock()

	return streamInfo{made: st.made, last: max(st.newest, st.reported)}
}

// removeRolledBack deletes a stream that was rolled back: its sequences would come again,
// and a replica may still expect one. It returns ErrNoStream on success. Only the leading
// manager deletes it, as another manager may just have made the stream.
func (s *streams) removeRolledBack(ctx context.Context, st *stream, seen streamInfo) error {
	name := st.state.Name
	if !s.c.leads() {
		return errors.New("it was rolled back: the leading manager will make it again")
	}
	there, err := s.readStream(ctx, name)
	switch {
	case err != nil:
		return err
	case !there.made.Equal(seen.made):
		return errors.New("it was rolled back and has been made again: checking again")
	}
	st.settings = seen.config // the answer may be lost
	if err := s.apiRequest(ctx, "STREAM.DELETE."+name, nil, nil); err != nil {
		return fmt.Errorf("it was rolled back and must be made again: %w (delete it, or allow mcm to delete it)", err)
	}

	return opstream.ErrNoStream
}

// sequenceAtRandom returns the first sequence of a new stream, from a range of which a
// stream uses a billionth in days. So it meets no sequence of an earlier stream of the same
// name. A clock does not ensure that: another clock may have been ahead, or this process
// may be frozen before the request. The range is below 2^53, JavaScript's exact integers.
func sequenceAtRandom() uint64 { return 1 + rand.Uint64N(1<<52) }

// ageOf returns the age of a provider's stream. It asks the server after it was called;
// concurrent calls share one question.
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

// askAges asks for a stream's age as long as calls wait for it.
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

// age returns for how long a stream has had all its records: since it was made, by the
// server's clock, or since it was, or may have been, rolled back. A server loses
// acknowledged records only by a restart, which ends connections.
func (s *streams) age(ctx context.Context, st *stream) (time.Duration, error) {
	info, err := s.readStream(ctx, st.state.Name)
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	whole := st.rolledBackAt
	s.mu.Unlock()
	if back := s.c.restart.Load(); back != nil {
		whole = later(whole, *back)
	}

	return min(info.now.Sub(info.made), time.Since(whole)), nil
}

// lacksRecords reports whether a stream has lost acknowledged records: its server was
// restored to an older state, or lost what was not on its disk yet.
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

// staleLeader is longer than a server stays leader without the other servers. Until then
// it may answer for a stream without the newest records.
const staleLeader = 15 * time.Second

// rolledBack lets a stream that lacks records be made again.
func (s *streams) rolledBack(ctx context.Context, st *stream, there streamInfo) error {
	if st.suspectSince.IsZero() {
		st.suspectSince = time.Now()
	}
	if there.replicated && time.Since(st.suspectSince) < staleLeader {
		return errors.New("it lacks acknowledged records: it was rolled back, or its leader has lost the other servers; checking again")
	}
	if st.newest != st.rolledFrom { // not the same rollback, whose stream could not be made again yet
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

// awaitStream waits a moment until operations of a provider can be claimed. The error says
// why they cannot.
func (c *Caller) awaitStream(ctx context.Context, provider string) error {
	st := c.streams.of(provider)
	limit := time.NewTimer(streamPatience)
	defer limit.Stop()
	select {
	case <-st.firstLook:
	case <-limit.C:
	case <-ctx.Done():
		return ctx.Err() //nolint:wrapcheck // the caller's own
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

// recheckStream checks a stream at once, as after an error.
func (c *Caller) recheckStream(provider string) { signal(c.streams.of(provider).recheck) }

// Streams returns the states of the operations streams of all known providers.
func (c *Caller) Streams() []StreamState {
	if c.streams == nil {
		return nil
	}

	s := c.streams
	s.mu.Lock()
	defer s.mu.Unlock()
	states := make([]StreamState, 0, len(s.seen))
	for _, st := range s.seen {
		states = append(states, st.state)
	}
	slices.SortFunc(states, func(a, b StreamState) int { return strings.Compare(a.Provider, b.Provider) })

	return states
}

func (c *Caller) ledger(provider string) opstream.Ledger {
	return opstream.Ledger{Inquirer: c.inquirer, Stream: bus.StreamName(c.cfg.Cluster, provider)}
}
