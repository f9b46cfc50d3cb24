package replica

import (
	"context"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// operation is an operation in a replica's hands: running, or settled and not yet
// acknowledged. Its mutable fields are guarded by operations.mu.
type operation struct {
	cluster   string
	id        string
	operation driverv1.Operation
	machine   string // uid; empty for operations on a class
	namespace string
	name      string
	request   *driverv1.Envelope
	lane      lane
	started   time.Time
	deadline  time.Time

	traceParent string
	cancel      context.CancelFunc

	// Where frames go: to whoever asked last.
	reply       string
	contentType string
	attempt     uint32

	accepted  bool
	returned  bool // the handler has
	stuck     bool // it was given up; machine and slot stay taken until the handler returns
	callBegun bool // a call that changes something may be at the provider
	// A call of an attempt before this one may be there, too: who asked for this one,
	// or for a later one that was attached to it, says so.
	earlierMayRun bool
	progress      string
	result        *driverv1.Result // set once settled
	ended         time.Time

	// Of mutations, which are claimed.
	claiming          bool       // the operations stream has not answered yet
	firstClaim, claim uint64     // stream sequences of what we wrote first and last
	beginning         sync.Mutex // held while a record is written that a call begins
	fenced            bool       // another attempt has taken the claim's place
	callRefused       bool       // a call to the provider was refused for it
	outcomeStored     bool       // the outcome was, or never will be
	storedAt          time.Time
	acknowledged      bool // mcm has acknowledged the result
	// It was asked for again: another attempt may have been sent, to take its claim's
	// place. Its result counts once it is stored there.
	askedAgain bool
	// answered: who asked last has the result, or gets it behind the word that we have
	// the operation.
	resultSent bool
}

// resultCounts tells that the result, once there is one, is what came of the operation, or
// leaves that open. operations.mu is held.
func (h *operation) resultCounts() bool {
	return !h.askedAgain || h.outcomeStored || h.result.GetOutcomeUnknown()
}

func (h *operation) key() string { return h.cluster + "/" + h.id }

func (h *operation) machineKey() string { return h.cluster + "/" + h.machine }

func (h *operation) state(now time.Time) *driverv1.OperationState {
	st := &driverv1.OperationState{
		OperationId: h.id, Attempt: h.attempt, Operation: h.operation,
		Namespace: h.namespace, Name: h.name, LastProgress: h.progress, Fenced: h.fenced,
	}
	end := now
	if h.result != nil {
		st.LastProgress = "" // thousands of these must fit one session
		st.Settled, st.Code, end = true, h.result.GetStatus().GetCode(), h.ended
	}
	st.Elapsed = durationpb.New(end.Sub(h.started))

	return st
}

// judgeFailure says of a failure, whatever the driver says of it, what is not known. CutOff
// tells that the driver could not say what it has done: its call was cut off, or it
// gave no answer that can be passed on. operations.mu is held.
func (h *operation) judgeFailure(result *driverv1.Result, cutOff bool) {
	// Its call was cut off halfway, or one of several was refused [RESULT-3].
	own := result.GetOutcomeUnknown() || h.callBegun && (cutOff || h.callRefused)
	// This attempt has ended before it could tell what an earlier one has done, or
	// that one is not over yet [RESULT-5]; what was refused is to be tried again
	// under this id, and not as another operation.
	earlier := h.callRefused || cutOff && bus.Mutates(h.operation) && h.request.GetRecover() ||
		h.recoversCreate() && !h.callBegun || h.operation == driverv1.Operation_OPERATION_CREATE && h.earlierMayRun
	result.OutcomeUnknown, result.NoEffect = own || earlier, earlier && !own
}

// recoversCreate tells that an earlier attempt may have made, or may yet make, an
// instance: nothing but a look for it makes a failure of this one an outcome. A lost
// delete or initialize leaves nothing behind that the next one would not find.
func (h *operation) recoversCreate() bool {
	return h.operation == driverv1.Operation_OPERATION_CREATE && h.request.GetRecover()
}
