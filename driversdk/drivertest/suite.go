package drivertest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A suite is the manager's side of the bus, and what it has seen of one driver.
type suite struct {
	cfg     Config
	conn    *bus.Conn
	nc      *nats.Conn
	caller  *caller.Caller // makes the operations stream
	fetches *fetches
	onFetch nats.MsgHandler
	fetched *nats.Subscription
	replies string // prefix of reply subjects
	prefix  string // of machines' names
	close   []func()

	plain  bool
	target string // the replica that is looked at; empty for a plain driver
	epoch  uint64

	listsByClass bool // the driver asks for the class to list

	groupReplies string                 // prefix of reply subjects about node groups
	groupsWere   map[string]*groupState // before the suite came, by id

	mu        sync.Mutex
	exchanges map[string]*exchange // by reply subject
	sessions  map[string][]session // by replica, newest last
	machines  []*machine           // may have an instance
	claimed   []claimed
	blames    map[string][]string // what was seen to be wrong, by clause
	made      int                 // machines so far

	groupCalls    map[string]*groupCall // by reply subject
	groupsTouched bool                  // sizes may have changed
}

// A session is one sign of life, as it came.
type session struct {
	*driverv1.Session

	at time.Time
}

// claimed is one record written on a claim's subject.
type claimed struct {
	*driverv1.Envelope

	subject, expected string
}

// sessionsKept bounds what is remembered of a replica.
const sessionsKept = 1000

// open connects, waits for the driver and finds out what kind it is.
func open(ctx context.Context, cfg Config) (*suite, error) {
	cfg, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	cfg.NATS.Name, cfg.NATS.FailFast, cfg.NATS.Logger = "driver-conformance", true, cfg.Logger
	cfg.NATS.InboxPrefix = bus.ManagerInboxPrefix
	s := &suite{
		cfg: cfg, prefix: "conformance-" + strings.ToLower(rand.Text()[:8]) + "-",
		exchanges: map[string]*exchange{}, sessions: map[string][]session{}, blames: map[string][]string{},
		groupCalls: map[string]*groupCall{}, groupsWere: map[string]*groupState{}, epoch: 1,
	}
	if s.conn, err = bus.Connect(ctx, cfg.NATS); err != nil {
		return nil, err
	}
	s.nc = s.conn.Client()
	s.close = append(s.close, s.conn.Close)
	if err := s.listen(ctx); err != nil {
		s.end()

		return nil, err
	}
	err = s.meet(ctx)
	if err == nil && cfg.NodeGroup != "" && !s.servesGroups() {
		err = fmt.Errorf("node group %s is to be looked at, and the driver does not say that it serves any: "+
			"OPERATION_NODE_GROUPS is not among the capabilities of its sessions", cfg.NodeGroup)
	}
	if err != nil {
		s.end()

		return nil, err
	}

	s.learn(ctx)

	return s, nil
}

func (s *suite) end() {
	for _, f := range slices.Backward(s.close) {
		f()
	}
}

// listen plays the manager's side.
func (s *suite) listen(ctx context.Context) error {
	var err error
	if s.fetches, err = newFetches(s.cfg, s.nc); err != nil {
		return err
	}
	fetchCtx, stop := context.WithCancel(context.WithoutCancel(ctx))
	s.close = append(s.close, stop)
	s.replies = s.below("reply." + s.cfg.Provider + "." + nuid.Next() + ".")
	s.groupReplies = s.below("reply." + s.cfg.Provider + "." + nuid.Next() + ".")
	s.onFetch = func(m *nats.Msg) { s.fetches.onFetch(fetchCtx, m) }
	subjects := map[string]nats.MsgHandler{
		s.replies + "*": s.onReply,
		s.below("session." + s.cfg.Provider + ".*"): s.onSession,
		s.below("claim." + s.cfg.Provider + ".*"):   s.onClaim,
	}
	subjects[s.groupReplies+"*"] = s.onGroupReply
	if s.cfg.OtherCluster != "" {
		subjects["mcm.v1."+s.cfg.OtherCluster+".fetch."+s.cfg.Provider+".*"] = s.onFetch
		subjects["mcm.v1."+s.cfg.OtherCluster+".reply."+s.cfg.Provider+".*.*"] = s.onReply
	}
	for subject, f := range subjects {
		if _, err := s.nc.Subscribe(subject, f); err != nil {
			return fmt.Errorf("subscribe to %s: %w", subject, err)
		}
	}
	if err := s.answerFetches(ctx); err != nil {
		return err
	}

	return s.startCaller()
}

// answerFetches has fetches of the control plane answered, from the time it returns.
func (s *suite) answerFetches(ctx context.Context) error {
	subject := s.below("fetch." + s.cfg.Provider + ".*")
	var err error
	if s.fetched, err = s.nc.Subscribe(subject, s.onFetch); err != nil {
		return fmt.Errorf("subscribe to %s: %w", subject, err)
	}

	return s.flush(ctx)
}

// leaveFetches is as if no manager were there to be asked, until answerFetches.
func (s *suite) leaveFetches(ctx context.Context) error {
	if err := s.fetched.Unsubscribe(); err != nil {
		return fmt.Errorf("unsubscribe from %s: %w", s.fetched.Subject, err)
	}
	s.fetches.touch()

	return s.flush(ctx)
}

// flush waits until the server has taken all subscriptions.
func (s *suite) flush(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Patience)
	defer cancel()

	return s.conn.Flush(ctx)
}

// startCaller has the operations stream made as the manager makes it.
func (s *suite) startCaller() error {
	caller, err := caller.New(s.conn, caller.Config{
		Cluster: s.cfg.Cluster, Operations: &caller.StreamConfig{Memory: true}, Key: s.fetches.key, Logger: s.cfg.Logger,
	})
	if err != nil {
		return err
	}
	if s.caller == nil {
		s.close = append(s.close, func() { s.caller.Close() })
	}
	s.caller = caller

	return nil
}

// meet waits for a full replica, or for a plain driver.
func (s *suite) meet(ctx context.Context) error {
	limit, cancel := context.WithTimeoutCause(ctx, s.cfg.Wait, fmt.Errorf(
		"no driver of provider %q came to the bus within %s (cluster %q): is it started, with this NATS and this provider?",
		s.cfg.Provider, s.cfg.Wait, s.cfg.Cluster))
	defer cancel()
	started := time.Now()
	tick := time.NewTicker(bus.SessionInterval / 10)
	defer tick.Stop()
	for {
		if s.chooseTarget() {
			return s.awaitStream(limit)
		}
		if time.Since(started) > 2*bus.SessionInterval && s.plainAnswers(limit) { // a full one would have been heard by now
			s.plain = true

			return nil
		}
		select {
		case <-tick.C:
		case <-limit.Done():
			return context.Cause(limit)
		}
	}
}

// chooseTarget looks at one replica that is alive.
func (s *suite) chooseTarget() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for replica, sessions := range s.sessions {
		last := sessions[len(sessions)-1]
		if !last.GetStopped() && !last.GetDraining() && time.Since(last.at) < 3*bus.SessionInterval {
			s.target = replica
			s.epoch = max(s.epoch, last.GetEpoch())

			return true
		}
	}

	return false
}

// awaitStream waits until replicas can claim.
func (s *suite) awaitStream(ctx context.Context) error {
	return s.within(ctx, s.cfg.Wait, "the operations stream is there (drivers that send sessions need a NATS with JetStream)",
		func() (bool, error) {
			streams := s.caller.Streams()

			return len(streams) > 0 && streams[0].Ready, nil
		})
}

// plainAnswers tells whether a plain driver listens.
func (s *suite) plainAnswers(ctx context.Context) bool {
	x, err := s.send(request{
		subject: s.below("plain." + s.cfg.Provider + ".list." + s.cfg.Class.Namespace + "." + s.cfg.Class.Name),
		env:     s.envelope("read-"+nuid.Next(), s.listBody()),
	})
	if err != nil {
		return false
	}
	f, err := x.next(ctx, s.cfg.Timeout)

	return err == nil && f.GetResult() != nil
}

// session returns the newest session of the replica that is looked at.
func (s *suite) session() session {
	s.mu.Lock()
	defer s.mu.Unlock()
	if all := s.sessions[s.target]; len(all) > 0 {
		return all[len(all)-1]
	}

	return session{}
}

// sessionsOf returns all that were heard of a replica.
func (s *suite) sessionsOf(replica string) []session {
	s.mu.Lock()
	defer s.mu.Unlock()

	return append([]session(nil), s.sessions[replica]...)
}

func (s *suite) onSession(m *nats.Msg) {
	env, err := bus.Decode(m.Data, m.Header.Get(headerContentType))
	if err != nil || env.GetSession() == nil {
		s.blamef("SESSION-1", "what is no session came on %s", m.Subject)

		return
	}
	got := session{env.GetSession(), time.Now()}
	replica := got.GetReplica()
	if m.Subject != s.below("session."+s.cfg.Provider+"."+replica) {
		s.blamef("SESSION-2", "a session on %s says that it is replica %q", m.Subject, replica)
	}
	if env.GetReplica() != replica {
		s.blamef("ENV-7", "the envelope of a session of replica %q says %q", replica, env.GetReplica())
	}
	for _, op := range got.GetOperations() {
		s.leak("PROGRESS-1", "a session's last_progress", op.GetLastProgress())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if all := s.sessions[replica]; len(all) < sessionsKept {
		s.sessions[replica] = append(all, got)
	} else {
		s.sessions[replica] = append(all[1:], got)
	}
}

func (s *suite) onClaim(m *nats.Msg) {
	if strings.HasPrefix(m.Subject, s.below("claim."+s.cfg.Provider+".~")) {
		return // no machine's: a manager tries there whether the stream takes writes
	}
	env, err := bus.Decode(m.Data, m.Header.Get(headerContentType))
	if err != nil {
		s.blamef("CLAIM-1", "what is no envelope came on %s: %v", m.Subject, err)

		return
	}
	s.mu.Lock()
	known := len(s.sessions[env.GetReplica()]) > 0
	s.claimed = append(s.claimed, claimed{env, m.Subject, m.Header.Get(headerExpected)})
	s.mu.Unlock()
	if !known {
		s.blamef("ENV-7", "the envelope of a claim says replica %q, which is none that has sent a session", env.GetReplica())
	}
}

// eventually polls until ok, for as long as s.cfg.Patience allows.
func (s *suite) eventually(ctx context.Context, what string, ok func() (bool, error)) error {
	return s.within(ctx, s.cfg.Patience, what, ok)
}

// within polls until ok, for as long as this and the driver's settle time allow.
func (s *suite) within(ctx context.Context, most time.Duration, what string, ok func() (bool, error)) error {
	limit := time.NewTimer(most + s.session().GetSettleTime().AsDuration())
	defer limit.Stop()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		done, err := ok()
		if done || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-limit.C:
			return errors.New("waited in vain until " + what)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// settled waits for as long as the cloud's list may lag behind.
func (s *suite) settled(ctx context.Context) error {
	return pause(ctx, s.session().GetSettleTime().AsDuration())
}

// pause is for what has to be given time, and cannot be waited for: nothing tells
// that a list has caught up, or that no frame comes.
func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
