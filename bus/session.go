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

// protocolVersion is the version of the contract this package speaks.
const protocolVersion = 1

// renewNow asks for a session without waiting for the next beat. It never
// blocks.
func (s *Server) renewNow() {
	select {
	case s.renew <- struct{}{}:
	default:
	}
}

// heartbeat publishes a session to each cluster at every beat, and sooner when
// something changed [SESSION-1].
func (s *Server) heartbeat(ctx context.Context) {
	tick := time.NewTicker(SessionInterval)
	defer tick.Stop()
	// A burst of settled operations must not become a burst of sessions.
	const pause = SessionInterval / 10
	for {
		s.publishSessions(false)
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
		case <-s.renew:
		}
	}
}

func (s *Server) publishSessions(stopped bool) {
	if !s.conn.Up() {
		return // nothing old is ever sent later
	}
	for _, cluster := range s.cfg.Clusters {
		err := s.publishSession(s.session(cluster, stopped))
		switch {
		case err == nil:
		case errors.Is(err, errTooLarge):
			// The replica is taken for dead, although it works.
			if time.Since(s.lastTooLarge) > reconnectLog {
				s.lastTooLarge = time.Now()
				s.log.Error("session not sent: mcm takes this replica for dead until it fits", "err", err)
			}
		case errors.Is(err, errEncode):
			s.log.Error("session not sent", "err", err)
		default:
			s.log.Debug("session not sent", "err", err)
		}
	}
}

// publishSession sends a session, with less said in it when it would be larger
// than the server takes.
func (s *Server) publishSession(session *driverv1.Session) error {
	subject := wildcard(session.GetCluster(), TreeSession, s.cfg.Provider, s.cfg.Replica)
	env := &driverv1.Envelope{Replica: s.cfg.Replica, Body: &driverv1.Envelope_Session{Session: session}}
	for _, shorten := range []func(*driverv1.Session, int){dropProgress, dropSettled, nil} {
		payload, err := Encode(env, "")
		if err != nil {
			return err
		}
		m := &nats.Msg{Subject: subject, Data: payload}
		limit := int(s.conn.nc.MaxPayload())
		if shorten == nil || limit <= 0 || m.Size() <= limit {
			return s.conn.publish(m)
		}
		shorten(session, m.Size()-limit)
	}

	return nil
}

// dropProgress leaves out what people would like to know and mcm does not need.
func dropProgress(session *driverv1.Session, _ int) {
	for _, op := range session.GetOperations() {
		op.LastProgress = ""
	}
}

// dropSettled leaves out settled operations until excess bytes are saved. A call
// that still waits for one asks the replica for its result; one that is resumed
// later is sent again, to be recovered.
func dropSettled(session *driverv1.Session, excess int) {
	session.Operations = slices.DeleteFunc(session.Operations, func(op *driverv1.OperationState) bool {
		if !op.GetSettled() || excess <= 0 {
			return false
		}
		excess -= proto.Size(op)

		return true
	})
}

func (s *Server) session(cluster string, stopped bool) *driverv1.Session {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sequence++
	session := &driverv1.Session{
		Cluster: cluster, Provider: s.cfg.Provider, Replica: s.cfg.Replica, Sequence: s.sequence,
		StartedAt: timestamppb.New(s.started), Version: s.cfg.Version, Protocol: protocolVersion,
		Slots: uint32(s.cfg.Slots), Running: uint32(s.running),
		Draining: s.draining, Stopped: stopped,
		CreateIdentity: s.cfg.CreateIdentity, Kind: s.cfg.Kind, ApiVersions: s.cfg.APIVersions,
		Capabilities: s.cfg.Capabilities, Hostname: s.cfg.Hostname,
	}
	if s.cfg.SettleTime > 0 {
		session.SettleTime = durationpb.New(s.cfg.SettleTime)
	}
	for _, h := range s.held {
		if h.cluster == cluster {
			session.Operations = append(session.Operations, h.state(now))
		}
	}
	slices.SortFunc(session.Operations, func(a, b *driverv1.OperationState) int {
		return strings.Compare(a.GetOperationId(), b.GetOperationId())
	})

	return session
}
