package drivertest

import (
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func (r *replica) beat() {
	interval := bus.SessionInterval
	if r.fault == "SESSION-1" {
		interval = bus.SessionInterval * 3 / 2
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for !r.nc.IsClosed() {
		r.renew()
		select {
		case <-tick.C:
		case <-r.ended:
			return
		}
	}
}

// session is the next one. r.mu is held.
func (r *replica) session() *driverv1.Session {
	r.sequence++
	s := &driverv1.Session{
		Cluster: "default", Provider: testProvider, Replica: r.id, Sequence: r.sequence, StartedAt: timestamppb.New(r.start),
		Protocol: 1, Slots: testSlots, CreateIdentity: r.identity, Draining: r.draining, Stopped: r.stopped,
		Capabilities: []driverv1.Operation{
			driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_INITIALIZE, driverv1.Operation_OPERATION_DELETE,
			driverv1.Operation_OPERATION_STATUS, driverv1.Operation_OPERATION_LIST, driverv1.Operation_OPERATION_VOLUME_IDS,
			driverv1.Operation_OPERATION_VALIDATE, driverv1.Operation_OPERATION_MIGRATE_CLASS,
			driverv1.Operation_OPERATION_NODE_GROUPS,
		},
		SessionId: r.lease, Leased: r.leased(), Epoch: r.epoch,
	}
	if r.fault == "SESSION-2" {
		s.Sequence = 7
	}
	for id, o := range r.ops {
		if o.result != nil && r.fault == "RESULT-2/session" {
			continue
		}
		s.Operations = append(s.Operations, &driverv1.OperationState{
			OperationId: id, Attempt: o.env.GetAttempt(), Settled: o.result != nil, LastProgress: o.progress,
		})
	}
	slices.SortFunc(s.Operations, func(a, b *driverv1.OperationState) int {
		return strings.Compare(a.GetOperationId(), b.GetOperationId())
	})

	return s
}

// renew sends sessions one at a time: each expects the sequence of the one before.
func (r *replica) renew() {
	r.renewing.Lock()
	defer r.renewing.Unlock()
	r.mu.Lock()
	session, expected := r.session(), r.last
	r.mu.Unlock()
	sent := time.Now()
	m := &nats.Msg{Subject: "mcm.v1.default.session." + testProvider + "." + r.id, Header: nats.Header{
		headerExpected: {strconv.FormatUint(expected, 10)}, headerTTL: {"3s"},
	}}
	if r.fault == "SESSION-3" {
		m.Header.Set(headerTTL, "60s")
	}
	m.Data = sessionData(session)
	answer, err := r.nc.RequestMsg(m, bus.SessionInterval*9/10)
	if err != nil {
		return
	}
	session.Cluster, session.SessionId, session.Leased = otherCluster, "", false // there it does not claim
	_ = r.nc.Publish("mcm.v1."+otherCluster+".session."+testProvider+"."+r.id, sessionData(session))
	seq, conflict := ackOf(answer)
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case seq > 0:
		r.last, r.acked = seq, sent
	case conflict > 0 || strings.Contains(string(answer.Data), "last sequence: 0"):
		r.last = conflict
		if r.fault == "FENCE-1" {
			return // goes on as if nothing had happened
		}
		r.lease, r.acked = nuid.Next(), time.Time{}
		for _, o := range r.ops {
			o.fenced = true
		}
	}
}

func sessionData(s *driverv1.Session) []byte {
	data, _ := proto.Marshal(&driverv1.Envelope{Replica: s.GetReplica(), Body: &driverv1.Envelope_Session{Session: s}})

	return data
}

// ackOf returns the sequence that was stored, or the one in the way.
func ackOf(m *nats.Msg) (seq, conflict uint64) {
	var ack struct {
		Sequence uint64 `json:"seq"`
		Error    struct {
			Description string `json:"description"`
		} `json:"error"`
	}
	if json.Unmarshal(m.Data, &ack) != nil {
		return 0, 0
	}
	text := ack.Error.Description
	conflict, _ = strconv.ParseUint(strings.TrimSpace(text[strings.LastIndexByte(text, ':')+1:]), 10, 64)

	return ack.Sequence, conflict
}

// leased tells whether the last acknowledged session is young. r.mu is held.
func (r *replica) leased() bool {
	held := time.Since(r.acked) < 1200*time.Millisecond
	if !held {
		for _, o := range r.ops {
			o.fenced = o.fenced || r.fault != "FENCE-2" && r.fault != "FENCE-2/back"
		}
	}

	return held
}

// begin is the moment before a call that changes something at the cloud; false when
// it must not be made.
func (r *replica) begin(o *op) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	held := r.leased()
	fenced := o.fenced || !held && r.fault == "FENCE-2/back"
	o.atCloud = o.atCloud || !fenced

	return !fenced
}

func (r *replica) onHello(m *nats.Msg) {
	env, err := bus.Decode(m.Data, "")
	if err != nil || r.fault == "HELLO-1" {
		return
	}
	r.mu.Lock()
	news := r.leader != env.GetHello().GetMcm()
	if r.fault != "ENV-6/hello" {
		r.epoch = max(r.epoch, env.GetHello().GetEpoch())
	}
	r.leader = env.GetHello().GetMcm()
	r.mu.Unlock()
	if news {
		r.renew()
	}
}
