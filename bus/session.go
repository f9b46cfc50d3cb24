package bus

import (
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
	// protocolVersion is the version of the contract this package speaks.
	protocolVersion = 1
	// maxSession bounds what each heartbeat sends and the operations stream
	// stores: some five thousand operations.
	maxSession = 512 << 10
)

// publishSession sends a session to a cluster, which is at the same time the
// renewal of the replica's lease there.
func (s *Server) publishSession(cluster string, stopped bool) {
	if !s.conn.Up() {
		return // nothing old is ever sent later
	}
	session, expected := s.session(cluster, stopped)
	m, err := s.sessionMessage(session, expected)
	if err == nil {
		sequence := session.GetSequence() // all that is to be kept of it
		_, err = s.inquirer.send(m, func(answer *nats.Msg) { s.onRenewal(cluster, sequence, answer) })
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
func (s *Server) sessionMessage(session *driverv1.Session, expected uint64) (*nats.Msg, error) {
	subject := wildcard(session.GetCluster(), TreeSession, s.cfg.Provider, s.cfg.Replica)
	env := &driverv1.Envelope{Replica: s.cfg.Replica, Body: &driverv1.Envelope_Session{Session: session}}
	limit := maxSession
	if most := int(s.conn.maxPayload()); most > 0 {
		limit = min(limit, most-replySpace)
	}
	for _, shorten := range []func(*driverv1.Session, int){dropProgress, dropSettled, dropOthers, nil} {
		m, err := message(subject, env, expected, sessionTTL)
		if err != nil || shorten == nil || m.Size() <= limit {
			return m, err
		}
		shorten(session, m.Size()-limit)
	}

	return nil, nil //nolint:nilnil // not reached
}

// replySpace is more than the reply subject takes that is yet to be added.
const replySpace = 256

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

// session says what the replica is and holds, and what stream sequence that is to
// replace.
func (s *Server) session(cluster string, stopped bool) (session *driverv1.Session, expected uint64) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sequence++
	l := s.leases[cluster]
	session = &driverv1.Session{
		Cluster: cluster, Provider: s.cfg.Provider, Replica: s.cfg.Replica, Sequence: s.sequence,
		StartedAt: timestamppb.New(s.started), Version: s.cfg.Version, Protocol: protocolVersion,
		Slots: uint32(s.cfg.Slots), Running: uint32(s.running), Deleting: uint32(s.deleting),
		Draining: s.draining, Stopped: stopped,
		CreateIdentity: s.cfg.CreateIdentity, Kind: s.cfg.Kind, ApiVersions: s.cfg.APIVersions,
		Capabilities: s.cfg.Capabilities, Hostname: s.cfg.Hostname,
		SessionId: l.id, Leased: l.holds(now), Epoch: s.epochs[cluster],
	}
	if s.cfg.SettleTime > 0 {
		session.SettleTime = durationpb.New(s.cfg.SettleTime)
	}
	for _, h := range s.held {
		if h.cluster == cluster {
			st := h.state(now)
			st.Fenced = s.fenced(h, now)
			session.Operations = append(session.Operations, st)
		}
	}
	slices.SortFunc(session.Operations, func(a, b *driverv1.OperationState) int {
		return strings.Compare(a.GetOperationId(), b.GetOperationId())
	})

	return session, l.send(s.sequence, now)
}
