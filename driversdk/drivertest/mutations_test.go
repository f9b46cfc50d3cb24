package drivertest

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// mutate takes, refuses or attaches to a mutation.
func (r *replica) mutate(reply, contentType string, env *driverv1.Envelope) {
	if refusal := r.refuse(env); refusal != nil {
		r.send(reply, contentType, env, &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: refusal}})

		return
	}
	if r.plain {
		r.send(reply, contentType, env, &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: r.limited(env, nil)}})

		return
	}
	o, answers := r.take(reply, env)
	for _, frame := range answers {
		r.send(reply, contentType, env, frame)
	}
	if o == nil {
		return
	}
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
	result := r.limited(env, o)
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

func (r *replica) refuse(env *driverv1.Envelope) *driverv1.Result {
	if env.GetAcceptBy().IsValid() && time.Now().After(env.GetAcceptBy().AsTime()) && r.fault != "ENV-8" {
		return resultOf(driverv1.Code_CODE_ABORTED, "stale")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if env.GetEpoch() < r.epoch && r.fault != "ENV-6" {
		return resultOf(driverv1.Code_CODE_ABORTED, "an earlier epoch")
	}
	r.epoch = max(r.epoch, env.GetEpoch())

	return nil
}

// take notes a mutation, unless it is here already or there is no room.
func (r *replica) take(reply string, env *driverv1.Envelope) (*op, []*driverv1.Envelope) {
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
	case running >= testSlots && r.fault != "BUSY-1":
		return nil, []*driverv1.Envelope{busy(driverv1.BusyReason_BUSY_REASON_SLOTS)}
	case env.GetClaimTerms() != nil && !r.leased():
		return nil, []*driverv1.Envelope{busy(driverv1.BusyReason_BUSY_REASON_SESSION)}
	}
	o := &op{env: env, machine: machine, reply: reply, lease: r.lease, cancel: make(chan struct{}, 1)}
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
	m := &nats.Msg{Subject: "mcm.v1.default.claim." + testProvider + "." + o.machine, Header: nats.Header{
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
func (r *replica) limited(env *driverv1.Envelope, o *op) *driverv1.Result {
	done := make(chan *driverv1.Result, 1)
	var stop chan struct{}
	if o == nil {
		o = &op{}
	}
	stop = o.cancel
	go func() { done <- r.do(env, o) }()
	select {
	case result := <-done:
		return result
	case <-stop:
		r.abandon(o)
		if r.fault == "CANCEL-1" {
			select {} // never says so
		}

		return resultOf(driverv1.Code_CODE_CANCELED, "cancelled")
	case <-time.After(env.GetTimeout().AsDuration()):
		if r.fault != "CREATE-4" {
			r.abandon(o)
		}

		return resultOf(driverv1.Code_CODE_DEADLINE_EXCEEDED, "too late")
	}
}

func (r *replica) abandon(o *op) {
	r.mu.Lock()
	defer r.mu.Unlock()
	o.fenced = true
}

// do does any operation.
func (r *replica) do(env *driverv1.Envelope, o *op) *driverv1.Result {
	ref := bus.ClassOf(env)
	if ref != nil {
		class, secret, err := r.fetch(ref)
		if err != nil {
			return resultOf(driverv1.Code_CODE_UNAVAILABLE, err.Error())
		}
		if token := string(secret.GetData()["token"]); ref.GetSecret() != nil && token != testToken {
			text := "the cloud does not take the token"
			if r.fault == "STATUSTEXT-1" {
				text += " " + token
			}

			return resultOf(driverv1.Code_CODE_UNAUTHENTICATED, text)
		}
		if strings.Contains(string(class.GetProviderSpec()), "conformance") {
			if r.fault == "VALIDATE-2" {
				return resultOf(driverv1.Code_CODE_INVALID_ARGUMENT, "something is wrong")
			}

			return resultOf(driverv1.Code_CODE_INVALID_ARGUMENT, "size: want text")
		}
	}
	switch env.GetBody().(type) {
	case *driverv1.Envelope_Create:
		return r.create(env.GetCreate().GetMachine(), o)
	case *driverv1.Envelope_Delete:
		return r.remove(env.GetDelete().GetMachine(), o)
	case *driverv1.Envelope_Status:
		return r.status(env.GetStatus().GetMachine())
	case *driverv1.Envelope_List:
		return r.listed()
	case *driverv1.Envelope_Validate:
		if r.fault == "VALIDATE-1" {
			r.make(&driverv1.Machine{Name: "trial", Uid: uid()})
		}

		return &driverv1.Result{Payload: &driverv1.Result_Validate{Validate: &driverv1.ValidateResponse{}}}
	default:
		if r.fault == "ENV-4" {
			return resultOf(driverv1.Code_CODE_INTERNAL, "what is that?")
		}

		return resultOf(driverv1.Code_CODE_UNIMPLEMENTED, "not here")
	}
}

func (r *replica) make(m *driverv1.Machine) *driverv1.Instance {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.made++
	i := &driverv1.Instance{
		ProviderId: fmt.Sprintf("acme:///%d", r.made), NodeName: m.GetName(), MachineName: m.GetName(), MachineUid: m.GetUid(),
	}
	switch r.fault {
	case "INSTANCE-1":
		i.ProviderId = fmt.Sprint(r.made)
	case "INSTANCE-2":
		i.MachineName = ""
	case "MACHINE-1":
		i.MachineUid = ""
	case "CREATE-3":
		return i
	}
	r.instances[i.GetProviderId()] = i

	return i
}

func (r *replica) create(m *driverv1.Machine, o *op) *driverv1.Result {
	created := func(i *driverv1.Instance) *driverv1.Result {
		response := &driverv1.CreateResponse{Instance: i}
		if r.fault == "MACHINE-2" {
			response.LastKnownState = testToken
		}

		return &driverv1.Result{Payload: &driverv1.Result_Create{Create: response}}
	}
	for _, i := range r.list() {
		taken := i.GetMachineName() == m.GetName()
		switch {
		case i.GetMachineUid() == m.GetUid() && r.fault != "CREATE-1" && r.fault != "ENV-9",
			taken && r.fault == "CREATE-2":
			return created(i)
		case taken && i.GetMachineUid() != m.GetUid() && r.fault != "IDENTITY-2":
			return resultOf(driverv1.Code_CODE_ALREADY_EXISTS, "the name is taken")
		}
	}
	r.mu.Lock()
	r.leased()
	fenced := o.fenced
	r.mu.Unlock()
	if fenced {
		result := resultOf(driverv1.Code_CODE_ABORTED, "fenced")
		result.OutcomeUnknown = true

		return result
	}

	return created(r.make(m))
}

func (r *replica) remove(m *driverv1.Machine, _ *op) *driverv1.Result {
	found := false
	for _, i := range r.list() {
		if i.GetMachineUid() == m.GetUid() && r.fault != "DELETE-2" || i.GetProviderId() == m.GetProviderId() {
			found = true
			r.mu.Lock()
			if r.fault != "DELETE-3" {
				delete(r.instances, i.GetProviderId())
			}
			r.mu.Unlock()
		}
	}
	if !found && r.fault == "DELETE-1" {
		return resultOf(driverv1.Code_CODE_NOT_FOUND, "no such instance")
	}

	return &driverv1.Result{Payload: &driverv1.Result_Delete{Delete: &driverv1.DeleteResponse{}}}
}

func (r *replica) status(m *driverv1.Machine) *driverv1.Result {
	for _, i := range r.list() {
		if i.GetMachineUid() == m.GetUid() || i.GetMachineUid() == "" && i.GetMachineName() == m.GetName() {
			return &driverv1.Result{Payload: &driverv1.Result_InstanceStatus{InstanceStatus: &driverv1.StatusResponse{Instance: i}}}
		}
	}
	switch r.fault {
	case "STATUS-1":
		r.make(m)
	case "STATUS-2":
		return resultOf(driverv1.Code_CODE_UNKNOWN, "no such instance")
	}

	return resultOf(driverv1.Code_CODE_NOT_FOUND, "no such instance")
}

func (r *replica) listed() *driverv1.Result {
	all := r.list()
	switch r.fault {
	case "LIST-1":
		r.mu.Lock()
		clear(r.instances)
		r.mu.Unlock()
	case "LIST-2":
		all = slices.DeleteFunc(all, func(i *driverv1.Instance) bool { return i.GetProviderId() == fmt.Sprintf("acme:///%d", r.made) })
	}

	return &driverv1.Result{Payload: &driverv1.Result_List{List: &driverv1.ListResponse{Instances: all}}}
}
