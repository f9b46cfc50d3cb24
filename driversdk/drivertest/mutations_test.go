package drivertest

import (
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// mutate takes, refuses or attaches to a mutation.
func (r *replica) mutate(cluster, reply, contentType string, env *driverv1.Envelope) {
	if refusal := r.refuse(env); refusal != nil {
		r.send(reply, contentType, env, refusal)

		return
	}
	if r.plain {
		r.send(reply, contentType, env, &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: r.limited(&op{cluster: cluster, env: env})}})

		return
	}
	o, answers := r.take(cluster, reply, contentType, env)
	for _, frame := range answers {
		r.send(reply, contentType, env, frame)
	}
	if o == nil {
		return
	}
	defer r.running.Done()
	if r.fault != "CLAIM-1" {
		if reason := r.claim(o); reason != driverv1.BusyReason_BUSY_REASON_UNSPECIFIED {
			r.mu.Lock()
			delete(r.ops, env.GetOperationId())
			r.mu.Unlock()
			r.send(reply, contentType, env, busy(reason))

			return
		}
	}
	r.send(reply, contentType, env, accepted())
	result := r.limited(o)
	r.mu.Lock()
	o.result = result
	if result.GetOutcomeUnknown() && r.fault != "RESULT-4" || r.fault == "RESULT-2" {
		delete(r.ops, env.GetOperationId())
	}
	to := o.reply
	r.mu.Unlock()
	r.store(o, driverv1.Claim_STATE_SETTLED)
	r.send(to, contentType, env, &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: result}})
}

func (r *replica) refuse(env *driverv1.Envelope) *driverv1.Envelope {
	if env.GetAcceptBy().IsValid() && time.Now().After(env.GetAcceptBy().AsTime()) && r.fault != "ENV-8" {
		if r.fault == "ENV-8/failed" {
			return &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: resultOf(driverv1.Code_CODE_ABORTED, "stale")}}
		}

		return busy(driverv1.BusyReason_BUSY_REASON_STALE)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if env.GetEpoch() < r.epoch && r.fault != "ENV-6" {
		result := resultOf(driverv1.Code_CODE_ABORTED, "an earlier epoch")
		result.OutcomeUnknown = r.fault != "ENV-6/known"

		return &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: result}}
	}
	r.epoch = max(r.epoch, env.GetEpoch())

	return nil
}

// take notes a mutation, unless it is here already or there is no room.
func (r *replica) take(cluster, reply, contentType string, env *driverv1.Envelope) (*op, []*driverv1.Envelope) {
	r.mu.Lock()
	defer r.mu.Unlock()
	id, machine := env.GetOperationId(), bus.MachineOf(env).GetUid()
	if o := r.ops[id]; o != nil && r.fault != "RUN-2" {
		o.reply = reply
		if o.result == nil {
			return nil, []*driverv1.Envelope{accepted()}
		}

		return nil, []*driverv1.Envelope{accepted(), {Body: &driverv1.Envelope_Result{Result: proto.CloneOf(o.result)}}}
	}
	running := 0
	for _, o := range r.ops {
		if o.result == nil {
			running++
		}
		if o.result == nil && o.machine == machine && r.fault != "RUN-1" && r.fault != "RUN-2" {
			return nil, []*driverv1.Envelope{busy(driverv1.BusyReason_BUSY_REASON_MACHINE)}
		}
	}
	switch {
	case r.denied[fmt.Sprint(id, "/", env.GetAttempt())]:
		return nil, []*driverv1.Envelope{busy(driverv1.BusyReason_BUSY_REASON_UNSPECIFIED)}
	case r.draining:
		return nil, []*driverv1.Envelope{busy(driverv1.BusyReason_BUSY_REASON_DRAINING)}
	case running >= testSlots && r.fault != "BUSY-1":
		return nil, []*driverv1.Envelope{busy(driverv1.BusyReason_BUSY_REASON_SLOTS)}
	case env.GetClaimTerms() != nil && !r.leased():
		return nil, []*driverv1.Envelope{busy(driverv1.BusyReason_BUSY_REASON_SESSION)}
	}
	r.running.Add(1)
	o := &op{
		cluster: cluster, env: env, machine: machine, reply: reply, contentType: contentType, lease: r.lease, cancel: make(chan struct{}, 1),
	}
	r.ops[id] = o

	return o, nil
}

func (r *replica) claim(o *op) driverv1.BusyReason {
	o.claimSeq = o.env.GetClaimTerms().GetSequence()
	if r.fault == "CLAIM-2" {
		o.claimSeq = 0
	}
	stored := r.store(o, driverv1.Claim_STATE_RUNNING)
	switch {
	case stored, r.fault == "CLAIM-4":
		return driverv1.BusyReason_BUSY_REASON_UNSPECIFIED
	case r.fault == "CLAIM-3":
		return driverv1.BusyReason_BUSY_REASON_SLOTS
	default:
		return driverv1.BusyReason_BUSY_REASON_CLAIM
	}
}

// store writes the claim's record in the place of the one before.
func (r *replica) store(o *op, state driverv1.Claim_State) bool {
	c := &driverv1.Claim{
		OperationId: o.env.GetOperationId(), Attempt: o.env.GetAttempt(), Operation: bus.OperationOf(o.env),
		Provider: testProvider, Replica: r.id, SessionId: o.lease, State: state,
	}
	if state == driverv1.Claim_STATE_SETTLED {
		c.Outcome = &driverv1.Outcome{
			Code: o.result.GetStatus().GetCode(), ProviderId: o.result.GetCreate().GetInstance().GetProviderId(),
		}
	}
	m := &nats.Msg{Subject: "mcm.v1." + o.cluster + ".claim." + testProvider + "." + o.machine, Header: nats.Header{
		headerExpected: {strconv.FormatUint(o.claimSeq, 10)},
	}}
	if r.fault == "CLAIM-5" && state == driverv1.Claim_STATE_SETTLED {
		m.Header = nil
	}
	m.Data, _ = proto.Marshal(&driverv1.Envelope{Replica: r.id, Body: &driverv1.Envelope_Claim{Claim: c}})
	answer, err := r.nc.RequestMsg(m, time.Second)
	if err != nil {
		return false
	}
	seq, _ := ackOf(answer)
	o.claimSeq = max(o.claimSeq, seq)

	return seq > 0
}

// limited does a mutation within its time, unless it is cancelled.
func (r *replica) limited(o *op) *driverv1.Result {
	done := make(chan *driverv1.Result, 1)
	go func() { done <- r.do(o.cluster, o.env, o) }()
	select {
	case result := <-done:
		if o.env.GetCreate() != nil && o.env.GetRecover() && result.GetStatus().GetCode() != driverv1.Code_CODE_OK {
			r.doubt(o, result)
		}

		return result
	case <-o.cancel:
		r.abandon(o)
		if r.fault == "CANCEL-1" {
			select {} // never says so
		}

		return resultOf(driverv1.Code_CODE_CANCELED, "cancelled")
	case <-time.After(o.env.GetTimeout().AsDuration()):
		result := resultOf(driverv1.Code_CODE_DEADLINE_EXCEEDED, "too late")
		result.OutcomeUnknown = r.abandon(o) && r.fault != "RESULT-3"

		return result
	}
}

// doubt says of a failed create with recover what is not known.
func (r *replica) doubt(o *op, result *driverv1.Result) {
	unlooked := !r.begun(o) && r.fault != "RESULT-3/recover"
	own, others := result.GetOutcomeUnknown(), unlooked
	if o.env.GetEarlierMayRun() {
		others = r.fault != "RESULT-5"
	}
	result.OutcomeUnknown = own || others
	result.NoEffect = result.GetOutcomeUnknown() && !own && r.fault != "RESULT-6"
}

// abandon keeps an operation from beginning anything, and tells whether it has
// begun already.
func (r *replica) abandon(o *op) (begun bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	o.fenced = r.fault != "CREATE-4"

	return o.atCloud
}

func (r *replica) begun(o *op) bool {
	r.mu.Lock()
	defer r.mu.Unlock()

	return o.atCloud
}

// tell says how far an operation is.
func (r *replica) tell(o *op) {
	if r.plain {
		return
	}
	text := "asking the cloud"
	if r.fault == "PROGRESS-1" {
		text += " with " + testToken
	}
	r.mu.Lock()
	o.progress = text
	to := o.reply
	r.mu.Unlock()
	r.send(to, o.contentType, o.env, &driverv1.Envelope{Body: &driverv1.Envelope_Progress{Progress: &driverv1.Progress{Message: text}}})
}
