package drivertest

import (
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
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
		Provider: testProvider, Replica: r.id, Sequence: r.sequence, StartedAt: timestamppb.New(r.start),
		Protocol: 1, Slots: testSlots, CreateIdentity: r.identity, Draining: r.draining, Stopped: r.stopped,
		Capabilities: []driverv1.Operation{
			driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_INITIALIZE, driverv1.Operation_OPERATION_DELETE,
			driverv1.Operation_OPERATION_STATUS, driverv1.Operation_OPERATION_LIST, driverv1.Operation_OPERATION_VOLUME_IDS,
			driverv1.Operation_OPERATION_VALIDATE, driverv1.Operation_OPERATION_MIGRATE_CLASS,
			driverv1.Operation_OPERATION_NODE_GROUPS,
		},
		Epoch: r.epoch,
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

// renew sends a session to each control plane.
func (r *replica) renew() {
	r.mu.Lock() // also while it publishes: they come in the order of their sequences
	defer r.mu.Unlock()
	session := r.session()
	for _, session.Cluster = range []string{"default", otherCluster} {
		data, _ := proto.Marshal(&driverv1.Envelope{Replica: r.id, Body: &driverv1.Envelope_Session{Session: session}})
		_ = r.nc.Publish("mcm.v1."+session.GetCluster()+".session."+testProvider+"."+r.id, data)
	}
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
	r.strange = env.GetHello().GetProtocolMin() > 1 && r.fault != "HELLO-2"
	r.mu.Unlock()
	if news {
		r.renew()
	}
}
