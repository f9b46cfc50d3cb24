package drivertest

import (
	"encoding/json"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// mutate takes, refuses or attaches to a mutation.
func (r *replica) mutate(o *op) {
	if refusal := r.refuse(o.env); refusal != nil {
		r.answer(o, refusal)

		return
	}
	if r.plain {
		r.answer(o, resultFrame(r.limited(o)))

		return
	}
	r.mu.Lock()
	taken, answers := r.take(o)
	for _, frame := range answers {
		r.answerLocked(o, frame) // before the result, if that comes now
	}
	r.mu.Unlock()
	if !taken {
		return
	}
	defer r.running.Done()
	if o.claiming {
		reason := r.claim(o)
		r.mu.Lock()
		o.claiming = false
		if reason != driverv1.BusyReason_BUSY_REASON_UNSPECIFIED {
			delete(r.ops, o.env.GetOperationId())
		}
		r.mu.Unlock()
		if reason != driverv1.BusyReason_BUSY_REASON_UNSPECIFIED {
			r.answer(o, busy(reason))

			return
		}
	}
	r.answer(o, accepted())
	result := r.limited(o)
	r.mu.Lock()
	o.result, o.ended = result, time.Now()
	r.keep(o)
	if r.counts(o) { // for who has asked by now; who asks later waits until it is stored
		r.answerLocked(o, resultFrame(result))
	}
	r.mu.Unlock()
	awaited, overtaken := r.storeEnd(o)
	switch {
	case !awaited:
	case overtaken:
		r.mu.Lock()
		delete(r.ops, o.env.GetOperationId())
		r.mu.Unlock()
	default:
		r.answer(o, resultFrame(result))
	}
}

// counts reports whether a result may be sent: another attempt that takes its claim's place
// would come to its own. r.mu is held.
func (r *replica) counts(o *op) bool {
	return !o.askedAgain || o.stored || o.result.GetOutcomeUnknown() || r.fault == "FENCE-3/again"
}

// answer sends a frame of an operation to who asked for it last.
func (r *replica) answer(o *op, frame *driverv1.Envelope) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answerLocked(o, frame)
}

func (r *replica) answerLocked(o *op, frame *driverv1.Envelope) {
	r.send(o.reply, o.contentType, &driverv1.Envelope{OperationId: o.env.GetOperationId(), Attempt: o.attempt}, frame)
}

func resultFrame(result *driverv1.Result) *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: proto.CloneOf(result)}}
}

// keep decides what becomes of an operation that has ended. r.mu is held.
func (r *replica) keep(o *op) {
	id := o.env.GetOperationId()
	failed := o.result.GetStatus().GetCode() != driverv1.Code_CODE_OK
	if o.result.GetOutcomeUnknown() && r.fault != "RESULT-4" || r.fault == "RESULT-2" || r.fault == "RESULT-2/failures" && failed {
		delete(r.ops, id)
	}
	if r.fault != "RESULT-2/newest" {
		return
	}
	for other, o := range r.ops {
		if other != id && o.result != nil {
			delete(r.ops, other)
		}
	}
}

// forget forgets a result that the manager has, once its claim has it as well.
// r.mu is held.
func (r *replica) forget(o *op) {
	done := o.stored || r.fault == "CLAIM-5/acknowledged" || r.fault == "CLAIM-1"
	if id := o.env.GetOperationId(); o.result != nil && o.known && done && r.ops[id] == o {
		delete(r.ops, id)
	}
}

func (r *replica) refuse(env *driverv1.Envelope) *driverv1.Envelope {
	if env.GetAcceptBy().IsValid() && time.Now().After(env.GetAcceptBy().AsTime()) && r.fault != "ENV-8" {
		if r.fault == "ENV-8/failed" {
			return &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: resultOf(driverv1.Code_CODE_ABORTED, "stale")}}
		}

		return busy(driverv1.BusyReason_BUSY_REASON_STALE)
	}
	if !r.plain && env.GetClaimTerms() == nil && r.fault != "CLAIM-6" {
		if r.fault == "CLAIM-6/busy" {
			return busy(driverv1.BusyReason_BUSY_REASON_CLAIM)
		}

		return frameOf(driverv1.Code_CODE_INVALID_ARGUMENT, "without claim_terms")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.strange {
		return busy(driverv1.BusyReason_BUSY_REASON_PROTOCOL)
	}
	if env.GetEpoch() < r.epoch && r.fault != "ENV-6" {
		result := resultOf(driverv1.Code_CODE_ABORTED, "an earlier epoch")
		result.OutcomeUnknown = r.fault != "ENV-6/known"

		return &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: result}}
	}
	r.epoch = max(r.epoch, env.GetEpoch())

	return nil
}

// take notes a mutation, unless it is here already or there is no room. r.mu is held.
func (r *replica) take(o *op) (taken bool, answers []*driverv1.Envelope) {
	id := o.env.GetOperationId()
	if known := r.known(id, o); known != nil {
		known.reply = o.reply
		if r.fault == "RUN-2/attempt" {
			o.attempt = known.attempt
		}
		known.attempt = o.attempt
		known.doubted = known.doubted || o.doubted && r.fault != "RESULT-5/attached"
		known.askedAgain = known.askedAgain || !known.stored
		if known.result == nil || !r.counts(known) {
			return false, []*driverv1.Envelope{accepted()}
		}

		return false, []*driverv1.Envelope{accepted(), resultFrame(known.result)}
	}
	running := 0
	for _, other := range r.ops {
		if other.result == nil {
			running++
		}
		if other.result == nil && other.machine == o.machine && r.fault != "RUN-1" && r.fault != "RUN-2" {
			return false, []*driverv1.Envelope{busy(driverv1.BusyReason_BUSY_REASON_MACHINE)}
		}
	}
	switch {
	case r.hasDenied(o):
		return false, []*driverv1.Envelope{busy(driverv1.BusyReason_BUSY_REASON_UNSPECIFIED)}
	case r.draining:
		return false, []*driverv1.Envelope{busy(driverv1.BusyReason_BUSY_REASON_DRAINING)}
	case running >= testSlots && r.fault != "BUSY-1":
		return false, []*driverv1.Envelope{busy(driverv1.BusyReason_BUSY_REASON_SLOTS)}
	}
	r.running.Add(1)
	o.claimSeq, o.claiming = o.env.GetClaimTerms().GetSequence(), r.fault != "CLAIM-1"
	r.ops[id] = o

	return true, nil
}

// known returns what is here of the operation that o asks for; nil when that is no
// answer to it. r.mu is held.
func (r *replica) known(id string, o *op) *op {
	known := r.ops[id]
	switch {
	case known == nil, r.fault == "RUN-2":
		return nil
	case known.result != nil && r.fault == "RUN-2/kept",
		known.result != nil && r.fault == "RESULT-2/second" && time.Since(known.ended) > time.Second:
		delete(r.ops, id)

		return nil
	}
	// It may ask about attempts of which a failure says nothing.
	outdated := o.doubted && known.result.GetStatus().GetCode() != driverv1.Code_CODE_OK && r.fault != "RUN-2/failed"
	if o.attempt <= known.attempt || !r.superseded(known, o) && !outdated {
		return known
	}
	if known.result != nil {
		delete(r.ops, id)
	}

	return nil
}

// superseded reports whether o's terms name another claim than those of what is known. r.mu
// is held.
func (r *replica) superseded(known, o *op) bool {
	terms := o.env.GetClaimTerms()
	if known.claiming || terms == nil || terms.Sequence == nil && r.fault != "RUN-2/unset" || r.fault == "RUN-2/superseded" {
		return false
	}

	from, to := known.firstClaim, known.claimSeq
	switch r.fault {
	case "RUN-2/last":
		from = to
	case "RUN-2/first":
		to = from
	}

	return terms.GetSequence() < from || terms.GetSequence() > to
}

// hasDenied reports whether the replica has said lately that it does not hold an attempt.
// r.mu is held.
func (r *replica) hasDenied(o *op) bool {
	d, ok := r.denied[o.env.GetOperationId()]
	remembers := denialKept
	if r.fault == "OPS-1/forgets" {
		remembers = time.Second
	}

	return ok && time.Since(d.at) <= remembers && (o.attempt == d.attempt || o.attempt < d.attempt && r.fault != "OPS-1/earlier")
}

func (r *replica) claim(o *op) driverv1.BusyReason {
	if terms := o.env.GetClaimTerms(); terms != nil && terms.Sequence == nil && r.fault != "CLAIM-3/unset" {
		return driverv1.BusyReason_BUSY_REASON_CLAIM // it is for what we would have
	}
	if r.fault == "CLAIM-2" {
		r.mu.Lock()
		o.claimSeq = 0
		r.mu.Unlock()
	}
	stored, conflict, _ := r.store(o, driverv1.Claim_STATE_RUNNING)
	switch {
	case stored, r.fault == "CLAIM-4":
		r.mu.Lock()
		o.firstClaim = o.claimSeq
		r.mu.Unlock()

		return driverv1.BusyReason_BUSY_REASON_UNSPECIFIED
	case r.fault == "CLAIM-3":
		return driverv1.BusyReason_BUSY_REASON_SLOTS
	case conflict || r.fault == "CLAIM-3/store":
		return driverv1.BusyReason_BUSY_REASON_CLAIM
	default:
		return driverv1.BusyReason_BUSY_REASON_STORE
	}
}

// beginTries bounds how often the record is written that a call begins.
const beginTries = 3

// begin is the moment before a call that changes something at the cloud; false when
// it must not be made.
func (r *replica) begin(o *op) bool {
	if r.plain || r.fault == "FENCE-1" {
		return r.goes(o)
	}
	state := driverv1.Claim_STATE_BEGUN
	if r.fault == "FENCE-1/state" {
		state = driverv1.Claim_STATE_RUNNING
	}
	o.writing.Lock()
	defer o.writing.Unlock()
	for range beginTries {
		sent := time.Now()
		stored, conflict, there := r.store(o, state)
		switch {
		case stored && (time.Since(sent) <= time.Second || r.fault == "FENCE-2"), !stored && !conflict && r.fault == "FENCE-1/unanswered":
			return r.goes(o)
		case stored:
		case conflict && (there > 0 && r.fault == "FENCE-1/again" || there == 0 && r.fault == "FENCE-1/lost"):
			r.mu.Lock()
			o.claimSeq = there
			r.mu.Unlock()
		default:
			r.mu.Lock()
			o.fenced = o.fenced || conflict
			r.mu.Unlock()

			return false
		}
	}

	return false
}

// goes notes that an operation begins, unless it is over.
func (r *replica) goes(o *op) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	o.atCloud = o.atCloud || !o.over

	return !o.over
}

// storeTries bounds how often the end of an operation is written.
const storeTries = 60

// storeEnd puts what came of an operation in the place of its claim, unless another
// attempt has that. Awaited is true when a caller waits for the result until then.
func (r *replica) storeEnd(o *op) (awaited, overtaken bool) {
	o.writing.Lock()
	defer o.writing.Unlock()
	state := driverv1.Claim_STATE_SETTLED
	if o.result.GetOutcomeUnknown() && r.fault != "CLAIM-5/unknown" {
		state = driverv1.Claim_STATE_RELEASED
	}
	again := time.NewTicker(bus.SessionInterval)
	defer again.Stop()
	for range storeTries {
		stored, conflict, _ := r.store(o, state)
		overtaken = conflict
		if stored || conflict {
			break
		}
		r.mu.Lock()
		forgotten := r.ops[o.env.GetOperationId()] != o && !o.result.GetOutcomeUnknown()
		r.mu.Unlock()
		if forgotten || r.fault == "CLAIM-5/once" || r.nc.IsClosed() {
			return false, false
		}
		<-again.C
	}
	r.mu.Lock()
	awaited = !r.counts(o)
	o.stored, o.fenced = true, o.fenced || overtaken
	r.forget(o)
	r.mu.Unlock()

	return awaited, overtaken
}

// record is the claim of an operation.
func (r *replica) record(o *op, state driverv1.Claim_State) *driverv1.Claim {
	r.mu.Lock()
	attempt := o.attempt
	r.mu.Unlock()
	c := &driverv1.Claim{
		OperationId: o.env.GetOperationId(), Attempt: attempt, Operation: bus.OperationOf(o.env), Namespace: o.subject[1],
		Name: o.subject[2], Provider: testProvider, Replica: r.id, Epoch: o.env.GetEpoch(), State: state,
	}
	switch r.fault {
	case "CLAIM-1/epoch":
		c.Epoch = 0
	case "CLAIM-1/name":
		c.Name = ""
	case "FENCE-1/replica":
		if state == driverv1.Claim_STATE_BEGUN {
			c.Replica = ""
		}
	}
	if state == driverv1.Claim_STATE_SETTLED {
		instance := o.result.GetCreate().GetInstance()
		c.Outcome = &driverv1.Outcome{
			Code: o.result.GetStatus().GetCode(), RetryAfter: o.result.GetStatus().GetRetryAfter(),
			ProviderId: instance.GetProviderId(), NodeName: instance.GetNodeName(), Addresses: instance.GetAddresses(),
		}
		c.Outcome.Sealed = r.seal(o)
		switch r.fault {
		case "CLAIM-5/code":
			c.Outcome.Code = driverv1.Code_CODE_OK
		case "CLAIM-5/node":
			c.Outcome.NodeName = ""
		case "CLAIM-5/retry":
			c.Outcome.RetryAfter = nil
		}
	}

	return c
}

// seal seals what of an outcome the control plane alone may read, if its key is known.
func (r *replica) seal(o *op) *driverv1.Sealed {
	r.mu.Lock()
	pin := r.cacheOf(o.cluster).pin
	r.mu.Unlock()
	if pin == "" {
		return nil
	}
	content := &driverv1.SealedOutcome{
		OperationId: o.env.GetOperationId(), Message: o.result.GetStatus().GetMessage(),
		LastKnownState: o.result.GetCreate().GetLastKnownState(),
	}
	if r.fault == "CLAIM-5/sealed" {
		content.OperationId = "another"
	}
	sealed, err := r.key.Seal(content, pin)
	if err != nil {
		r.t.Error(err)
	}

	return sealed
}

// answerLimit is longer than any clause of the suite has a stream's answer wait.
const answerLimit = 2 * time.Second

// store writes the claim's record in the place of the one before; there is the sequence
// of what is in the way.
func (r *replica) store(o *op, state driverv1.Claim_State) (stored, conflict bool, there uint64) {
	r.mu.Lock()
	expected := o.claimSeq
	r.mu.Unlock()
	m := &nats.Msg{Subject: "mcm.v1." + o.cluster + ".claim." + testProvider + "." + o.machine, Header: nats.Header{
		headerExpected: {strconv.FormatUint(expected, 10)},
	}}
	if r.fault == "CLAIM-5" && state == driverv1.Claim_STATE_SETTLED || r.fault == "FENCE-1/blind" && state == driverv1.Claim_STATE_BEGUN {
		m.Header = nil
	}
	env := &driverv1.Envelope{Replica: r.id, Body: &driverv1.Envelope_Claim{Claim: r.record(o, state)}}
	if r.fault == "ENV-7/claim" {
		env.Replica = ""
	}
	m.Data, _ = proto.Marshal(env)
	answer, err := r.nc.RequestMsg(m, answerLimit)
	if err != nil {
		return false, false, 0
	}
	seq, there, stored, conflict := ackOf(answer)
	if stored {
		r.mu.Lock()
		o.claimSeq = seq
		r.mu.Unlock()
	}

	return stored, conflict, there
}

// ackOf returns the sequence that was stored, or the one in the way.
func ackOf(m *nats.Msg) (seq, there uint64, stored, conflict bool) {
	var ack struct {
		Sequence uint64 `json:"seq"`
		Error    struct {
			Code        int    `json:"err_code"`
			Description string `json:"description"`
		} `json:"error"`
	}
	if json.Unmarshal(m.Data, &ack) != nil {
		return 0, 0, false, false
	}
	text := ack.Error.Description
	there, _ = strconv.ParseUint(strings.TrimSpace(text[strings.LastIndexByte(text, ':')+1:]), 10, 64)

	return ack.Sequence, there, ack.Error.Code == 0, ack.Error.Code == 10071 || ack.Error.Code == 10164
}

// limited does a mutation within its time, unless it is cancelled.
func (r *replica) limited(o *op) *driverv1.Result {
	done := make(chan *driverv1.Result, 1)
	go func() { done <- r.do(o.cluster, o.env, o) }()
	select {
	case result := <-done:
		if o.env.GetCreate() != nil && result.GetStatus().GetCode() != driverv1.Code_CODE_OK {
			r.doubt(o, result)
		}

		return result
	case <-o.cancel:
		r.abandon(o)
		if r.fault == "CANCEL-1" {
			select {} // never says so
		}

		return resultOf(driverv1.Code_CODE_CANCELED, "cancelled")
	case <-time.After(r.timeoutOf(o.env)):
		result := resultOf(driverv1.Code_CODE_DEADLINE_EXCEEDED, "too late")
		result.OutcomeUnknown = r.abandon(o) && r.fault != "RESULT-3"

		return result
	}
}

// doubt says of a failed create what is not known.
func (r *replica) doubt(o *op, result *driverv1.Result) {
	unlooked := o.env.GetRecover() && !r.begun(o) && r.fault != "RESULT-3/recover"
	own, others := result.GetOutcomeUnknown() && !result.GetNoEffect(), result.GetNoEffect() || unlooked
	r.mu.Lock()
	if o.doubted {
		others = r.fault != "RESULT-5"
	}
	r.mu.Unlock()
	result.OutcomeUnknown = own || others
	result.NoEffect = result.GetOutcomeUnknown() && !own && r.fault != "RESULT-6"
}

// abandon keeps an operation from beginning anything, and reports whether it has
// begun already.
func (r *replica) abandon(o *op) (begun bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	o.over = r.fault != "CREATE-4"

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
	r.mu.Unlock()
	r.answer(o, &driverv1.Envelope{Body: &driverv1.Envelope_Progress{Progress: &driverv1.Progress{Message: text}}})
}
