package replica

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/opstream"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// maxKeptResults and opstream.KeptFor bound the results kept for an absent mcm.
const maxKeptResults = 2048

// recordAndFree records the result of an operation and frees what it occupies. A mutation's
// result is kept until mcm has stored it.
func (o *operations) recordAndFree(h *operation, result *driverv1.Result, cutOff bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.recordLocked(h, result, cutOff)
	o.freeLocked(h)
}

// recordLocked records a result.
func (o *operations) recordLocked(h *operation, result *driverv1.Result, cutOff bool) {
	now := time.Now()
	if result.GetStatus().GetCode() != driverv1.Code_CODE_OK {
		h.judgeFailure(result, cutOff)
	}
	h.result, h.ended = result, now
	if bus.Mutates(h.operation) {
		if result.GetOutcomeUnknown() {
			delete(o.byID, h.key()) // it must be retried under this very id [RESULT-4]
		}
		o.forgetOldLocked(now)
	}
}

// forgetOldLocked bounds the results kept for an mcm that never acknowledges.
func (o *operations) forgetOldLocked(now time.Time) {
	var oldest *operation
	settled := 0
	for key, h := range o.byID {
		switch {
		case h.result == nil:
			continue
		case now.Sub(h.ended) > opstream.KeptFor:
			delete(o.byID, key)

			continue
		}
		settled++
		if oldest == nil || h.ended.Before(oldest.ended) {
			oldest = h
		}
	}
	if settled > maxKeptResults {
		o.log.Warn("too many results that mcm has not acknowledged; forgetting the oldest", "operation_id", oldest.id)
		delete(o.byID, oldest.key())
	}
}

// acknowledge forgets a result that mcm has stored, once the outcome is in the stream:
// nothing else would end the claim.
func (o *operations) acknowledge(key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	h, ok := o.byID[key]
	switch {
	case !ok || h.result == nil:
	case !h.outcomeStored:
		h.acknowledged = true
	default:
		delete(o.byID, key)
	}
	signal(o.acked)
}

// answerOps returns the operations of a control plane, or the one wanted. The replica will
// not take an attempt that it denies having here [OPS-1].
func (o *operations) answerOps(cluster, want string, attempt uint32, now time.Time) *driverv1.OpsResponse {
	answer, denied := &driverv1.OpsResponse{}, true
	o.mu.Lock()
	defer o.mu.Unlock()
	if want == "" {
		answer.Operations = o.statesLocked(cluster, now)

		return answer
	}
	if h, ok := o.byID[cluster+"/"+want]; ok {
		st := h.state(now)
		answer.Operations = append(answer.Operations, st)
		denied = st.GetFenced() // mcm treats a fenced attempt as absent
		if h.resultCounts() {
			answer.Result = h.result
		}
	}
	if denied && attempt > 0 {
		o.denials.add(cluster+"/"+want, attempt, now)
	}

	return answer
}

// statesLocked lists a control plane's mutations, including stuck calls.
func (o *operations) statesLocked(cluster string, now time.Time) []*driverv1.OperationState {
	var states []*driverv1.OperationState
	for _, h := range o.byID {
		if h.cluster == cluster {
			states = append(states, h.state(now))
		}
	}
	for h := range o.stuck {
		if h.cluster == cluster && bus.Mutates(h.operation) {
			states = append(states, &driverv1.OperationState{
				OperationId: h.id, Attempt: h.attempt, Operation: h.operation, Namespace: h.namespace, Name: h.name,
				Elapsed: durationpb.New(now.Sub(h.started)), Stuck: true, LastProgress: "ignores its deadline; the replica's log has the stack",
			})
		}
	}

	return states
}

// unstored returns the results of a control plane's mutations that the operations stream
// does not have and that were not sent there recently.
func (o *operations) unstored(cluster string, now time.Time, ago time.Duration) map[*operation]*driverv1.Result {
	unstored := map[*operation]*driverv1.Result{}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, h := range o.byID {
		if h.cluster == cluster && h.result != nil && !h.outcomeStored && now.Sub(h.storedAt) > ago {
			unstored[h] = h.result
		}
	}

	return unstored
}

// unstoredResults returns the number of results that the operations streams do not have.
func (o *operations) unstoredResults() int {
	n := 0
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, h := range o.byID {
		if h.result != nil && !h.outcomeStored {
			n++
		}
	}

	return n
}
