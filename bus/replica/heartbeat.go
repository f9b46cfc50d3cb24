package replica

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

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// maxSession bounds the size of a session, to some five thousand operations.
const maxSession = 512 << 10

// A heartbeat publishes a replica's sessions. It is safe for concurrent use.
type heartbeat struct {
	part

	started  time.Time
	ops      *operations
	managers *managers
	claims   *claims
	renew    map[string]chan struct{} // asks for a session at once, by cluster

	sequence       uint64    // guarded by ops.mu
	unsentLoggedAt time.Time // when a failed session was last logged; guarded by ops.mu
}

// renewNow requests a session to every cluster before the next beat. It never blocks.
func (b *heartbeat) renewNow() {
	for _, cluster := range b.cfg.Clusters {
		signal(b.renew[cluster])
	}
}

// signal puts a value into a channel with a buffer of one. It never blocks.
func signal(ch chan<- struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// publishSessions publishes a session to a cluster at every beat, and sooner after a
// change [SESSION-1].
func (b *heartbeat) publishSessions(ctx context.Context, cluster string) {
	tick := time.NewTicker(bus.SessionInterval)
	defer tick.Stop()
	// A burst of results must not become a burst of sessions.
	const pause = bus.SessionInterval / 10
	for {
		b.publishSession(cluster, false)
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
			b.claims.storeOutcomes(cluster)
		case <-b.renew[cluster]:
		}
	}
}

// publishSession sends a session to a cluster.
func (b *heartbeat) publishSession(cluster string, stopped bool) {
	if !b.conn.Up() {
		return // a session must not be sent late
	}
	m, err := b.sessionMessage(b.session(cluster, stopped))
	if err == nil {
		err = b.conn.Publish(m)
	}
	switch {
	case err == nil:
	case errors.Is(err, bus.ErrTooLarge), errors.Is(err, bus.ErrEncode):
		// mcm counts the replica as dead, although it works.
		b.ops.mu.Lock()
		quiet := time.Since(b.unsentLoggedAt) < bus.LogPause
		if !quiet {
			b.unsentLoggedAt = time.Now()
		}
		b.ops.mu.Unlock()
		if !quiet {
			b.log.Error("session not sent: mcm counts this replica as dead", "err", err)
		}
	default:
		b.log.Debug("session not sent", "err", err)
	}
}

// sessionMessage returns the message of a session. It leaves out parts if the message
// would be larger than maxSession or the server's limit.
func (b *heartbeat) sessionMessage(session *driverv1.Session) (*nats.Msg, error) {
	subject := bus.Pattern(session.GetCluster(), bus.TreeSession, b.cfg.Provider, b.cfg.Replica)
	env := &driverv1.Envelope{Replica: b.cfg.Replica, Body: &driverv1.Envelope_Session{Session: session}}
	limit := maxSession
	if most := int(b.conn.MaxPayload()); most > 0 {
		limit = min(limit, most)
	}
	shorten := []func(excess int){
		func(int) {
			for _, op := range session.GetOperations() {
				op.LastProgress = "" // mcm does not need it
			}
		},
		// mcm asks for those that it waits for.
		func(excess int) { omit(session, excess, (*driverv1.OperationState).GetSettled) },
		func(excess int) { omit(session, excess, func(*driverv1.OperationState) bool { return true }) },
	}
	for {
		payload, err := bus.Encode(env, "")
		m := &nats.Msg{Subject: subject, Data: payload}
		if err != nil || m.Size() <= limit || len(shorten) == 0 {
			return m, err
		}
		shorten[0](m.Size() - limit)
		shorten = shorten[1:]
	}
}

// omit leaves some operations out of a session until excess bytes are saved.
func omit(session *driverv1.Session, excess int, some func(*driverv1.OperationState) bool) {
	session.Operations = slices.DeleteFunc(session.Operations, func(op *driverv1.OperationState) bool {
		if excess <= 0 || !some(op) {
			return false
		}
		excess -= proto.Size(op)
		session.Omitted++

		return true
	})
}

// session returns the replica's session.
func (b *heartbeat) session(cluster string, stopped bool) *driverv1.Session {
	now := time.Now()
	b.ops.mu.Lock()
	defer b.ops.mu.Unlock()
	b.sequence++
	session := &driverv1.Session{
		Cluster: cluster, Provider: b.cfg.Provider, Replica: b.cfg.Replica, Sequence: b.sequence,
		StartedAt: timestamppb.New(b.started), Version: b.cfg.Version, Protocol: b.managers.protocols.Highest, ProtocolMin: b.managers.protocols.Lowest,
		Slots: uint32(b.cfg.Slots), Running: uint32(b.ops.mutatingLocked()), Deleting: uint32(b.ops.taken[laneDeletes]),
		Draining: b.ops.draining, Stopped: stopped,
		CreateIdentity: b.cfg.CreateIdentity, Kind: b.cfg.Kind, ApiVersions: b.cfg.APIVersions,
		Capabilities: b.cfg.Capabilities, Hostname: b.cfg.Hostname,
		Epoch: b.managers.epoch(cluster),
	}
	if b.cfg.SettleTime > 0 {
		session.SettleTime = durationpb.New(b.cfg.SettleTime)
	}
	if highest := b.claims.highest[cluster]; highest.sequence > 0 {
		session.ClaimSequence, session.ClaimStreamMade = highest.sequence, timestamppb.New(highest.made)
	}
	session.Operations = b.ops.statesLocked(cluster, now)
	slices.SortFunc(session.Operations, func(a, b *driverv1.OperationState) int {
		return strings.Compare(a.GetOperationId(), b.GetOperationId())
	})

	return session
}
