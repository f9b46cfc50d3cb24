package bus

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// maxSession bounds what each heartbeat sends: some five thousand operations.
	maxSession = 512 << 10
)

// renewNow asks for a session to every cluster without waiting for the next
// beat. It never blocks.
func (s *Server) renewNow() {
	for _, cluster := range s.cfg.Clusters {
		signal(s.renew[cluster])
	}
}

// signal leaves a word on a channel of one place. It never blocks.
func signal(ch chan<- struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// heartbeat publishes a session to a cluster at every beat, and sooner when
// something changed [SESSION-1].
func (s *Server) heartbeat(ctx context.Context, cluster string) {
	tick := time.NewTicker(SessionInterval)
	defer tick.Stop()
	// A burst of settled operations must not become a burst of sessions.
	const pause = SessionInterval / 10
	for {
		s.publishSession(cluster, false)
		hold := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			hold.Stop()

			return
		case <-hold.C:
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			s.storeOutcomes(cluster)
		case <-s.renew[cluster]:
		}
	}
}

// stop sees to it that nothing is begun any more, and says so.
func (s *Server) stop() {
	s.mu.Lock()
	s.stopped = true
	s.mu.Unlock()
	for _, cluster := range s.cfg.Clusters {
		s.publishSession(cluster, true)
	}
}

// publishSession sends a session to a cluster.
func (s *Server) publishSession(cluster string, stopped bool) {
	if !s.conn.Up() {
		return // nothing old is ever sent later
	}
	m, err := s.sessionMessage(s.session(cluster, stopped))
	if err == nil {
		err = s.conn.publish(m)
	}
	switch {
	case err == nil:
	case errors.Is(err, errTooLarge), errors.Is(err, errEncode):
		// The replica is taken for dead, although it works.
		s.mu.Lock()
		quiet := time.Since(s.sessionLog) < reconnectLog
		if !quiet {
			s.sessionLog = time.Now()
		}
		s.mu.Unlock()
		if !quiet {
			s.log.Error("session not sent: mcm takes this replica for dead until it is", "err", err)
		}
	default:
		s.log.Debug("session not sent", "err", err)
	}
}

// sessionMessage makes the message of a session, with less said in it when it
// would be larger than is good or than the server takes.
func (s *Server) sessionMessage(session *driverv1.Session) (*nats.Msg, error) {
	subject := wildcard(session.GetCluster(), TreeSession, s.cfg.Provider, s.cfg.Replica)
	env := &driverv1.Envelope{Replica: s.cfg.Replica, Body: &driverv1.Envelope_Session{Session: session}}
	limit := maxSession
	if most := int(s.conn.maxPayload()); most > 0 {
		limit = min(limit, most)
	}
	for _, shorten := range []func(*driverv1.Session, int){dropProgress, dropSettled, dropOthers, nil} {
		payload, err := Encode(env, "")
		m := &nats.Msg{Subject: subject, Data: payload}
		if err != nil || shorten == nil || m.Size() <= limit {
			return m, err
		}
		shorten(session, m.Size()-limit)
	}

	return nil, nil //nolint:nilnil // not reached
}

// dropProgress leaves out what people would like to know and mcm does not need.
func dropProgress(session *driverv1.Session, _ int) {
	for _, op := range session.GetOperations() {
		op.LastProgress = ""
	}
}

// dropSettled leaves out settled operations until excess bytes are saved: mcm
// asks for what it waits for.
func dropSettled(session *driverv1.Session, excess int) {
	dropSome(session, excess, (*driverv1.OperationState).GetSettled)
}

// dropOthers leaves out what runs as well.
func dropOthers(session *driverv1.Session, excess int) {
	dropSome(session, excess, func(*driverv1.OperationState) bool { return true })
}

func dropSome(session *driverv1.Session, excess int, some func(*driverv1.OperationState) bool) {
	session.Operations = slices.DeleteFunc(session.Operations, func(op *driverv1.OperationState) bool {
		if !some(op) || excess <= 0 {
			return false
		}
		excess -= proto.Size(op)
		session.Omitted++

		return true
	})
}

// session says what the replica is and holds.
func (s *Server) session(cluster string, stopped bool) *driverv1.Session {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sequence++
	session := &driverv1.Session{
		Cluster: cluster, Provider: s.cfg.Provider, Replica: s.cfg.Replica, Sequence: s.sequence,
		StartedAt: timestamppb.New(s.started), Version: s.cfg.Version, Protocol: s.protocols.highest, ProtocolMin: s.protocols.lowest,
		Slots: uint32(s.cfg.Slots), Running: uint32(s.running), Deleting: uint32(s.deleting),
		Draining: s.draining, Stopped: stopped,
		CreateIdentity: s.cfg.CreateIdentity, Kind: s.cfg.Kind, ApiVersions: s.cfg.APIVersions,
		Capabilities: s.cfg.Capabilities, Hostname: s.cfg.Hostname,
		Epoch: s.epochs[cluster],
	}
	if s.cfg.SettleTime > 0 {
		session.SettleTime = durationpb.New(s.cfg.SettleTime)
	}
	if highest := s.highest[cluster]; highest.sequence > 0 {
		session.ClaimSequence, session.ClaimStreamMade = highest.sequence, timestamppb.New(highest.made)
	}
	for _, h := range s.held {
		if h.cluster == cluster {
			session.Operations = append(session.Operations, h.state(now))
		}
	}
	session.Operations = append(session.Operations, s.stuckStates(cluster, now)...)
	slices.SortFunc(session.Operations, func(a, b *driverv1.OperationState) int {
		return strings.Compare(a.GetOperationId(), b.GetOperationId())
	})

	return session
}
