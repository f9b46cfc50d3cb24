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
func (o *operations) recordAndFree(op *operation, result *driverv1.Result, cutOff bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.recordLocked(op, result, cutOff)
	o.freeLocked(op)
}

// recordLocked records a result.
func (o *operations) recordLocked(op *operation, result *driverv1.Result, cutOff bool) {
	now := time.Now()
	if result.GetStatus().GetCode() != driverv1.Code_CODE_OK {
		op.judgeFailure(result, cutOff)
	}
	op.result, op.ended = result, now
	if bus.Mutates(op.operation) {
		if result.GetOutcomeUnknown() {
			delete(o.byID, op.key()) // it must be retried under this very id [RESULT-4]
		}
		o.forgetOldLocked(now)
	}
}

// forgetOldLocked bounds the results kept for an mcm that never acknowledges.
func (o *operations) forgetOldLocked(now time.Time) {
	var oldest *operation
	settled := 0
	for key, op := range o.byID {
		switch {
		case op.result == nil:
			continue
		case now.Sub(op.ended) > opstream.KeptFor:
			delete(o.byID, key)

			continue
		}
		settled++
		if oldest == nil || op.ended.Before(oldest.ended) {
			oldest = op
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
	op, ok := o.byID[key]
	switch {
	case !ok || op.result == nil:
	case !op.outcomeStored:
		op.acknowledged = true
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
	if op, ok := o.byID[cluster+"/"+want]; ok {
		st := op.state(now)
		answer.Operations = append(answer.Operations, st)
		denied = st.GetFenced() // mcm treats a fenced attempt as absent
		if op.resultCounts() {
			answer.Result = op.result
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
	for _, op := range o.byID {
		if op.cluster == cluster {
			states = append(states, op.state(now))
		}
	}
	for op := range o.stuck {
		if op.cluster == cluster && bus.Mutates(op.operation) {
			states = append(states, &driverv1.OperationState{
				OperationId: op.id, Attempt: op.attempt, Operation: op.operation, Namespace: op.namespace, Name: op.name,
				Elapsed: durationpb.New(now.Sub(op.started)), Stuck: true, LastProgress: "ignores its deadline; the replica's log has the stack",
			})
		}
	}

	return states
}

// unstored returns the results that the operations streams do not have, of the mutations
// that are wanted.
func (o *operations) unstored(wanted func(*operation) bool) map[*operation]*driverv1.Result {
	unstored := map[*operation]*driverv1.Result{}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, op := range o.byID {
		if op.result != nil && !op.outcomeStored && wanted(op) {
			unstored[op] = op.result
		}
	}

	return unstored
}
