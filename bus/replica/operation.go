package replica

import (
	"context"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// An operation is one that a replica has: it runs, or has ended and is not acknowledged.
// operations.mu guards its mutable fields.
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

	// Where frames go: to the last asker.
	reply       string
	contentType string
	attempt     uint32

	accepted  bool
	returned  bool // the handler has returned
	stuck     bool // it was given up; it occupies machine and slot until the handler returns
	callBegun bool // a call that changes something may be at the provider
	// A call of an earlier attempt may be at the provider, too, as this request or one
	// attached to it says.
	earlierMayRun bool
	progress      string
	result        *driverv1.Result // set once it has ended
	ended         time.Time

	// Only mutations, which are claimed, use the fields below.
	claimSubject      string     // of the claim on the machine
	claiming          bool       // the operations stream has not answered yet
	firstClaim, claim uint64     // stream sequences of our first and last record
	beginning         sync.Mutex // locked while a BEGUN record is written
	fenced            bool       // another attempt has replaced the claim
	callRefused       bool       // the fence refused a call to the provider
	outcomeStored     bool       // the outcome is stored, or never will be
	storedAt          time.Time
	acknowledged      bool // mcm has acknowledged the result
	// It was asked for again: another attempt may have been sent and may replace the claim.
	// The result counts once it is stored.
	askedAgain bool
	// resultSent: the last asker has the result, or gets it after the accepted frame.
	resultSent bool
}

// resultCounts reports whether the result, once there is one, is the operation's outcome,
// or leaves the outcome unknown. An operation asked for again has none if its claim is
// another attempt's. The caller holds operations.mu.
func (op *operation) resultCounts() bool {
	return !op.askedAgain || op.outcomeStored && !op.fenced || op.result.GetOutcomeUnknown()
}

func (op *operation) key() string { return op.cluster + "/" + op.id }

func (op *operation) machineKey() string { return op.cluster + "/" + op.machine }

func (op *operation) state(now time.Time) *driverv1.OperationState {
	st := &driverv1.OperationState{
		OperationId: op.id, Attempt: op.attempt, Operation: op.operation,
		Namespace: op.namespace, Name: op.name, LastProgress: op.progress, Fenced: op.fenced,
	}
	end := now
	if op.result != nil {
		st.LastProgress = "" // thousands of these must fit one session
		st.Settled, st.Code, end = true, op.result.GetStatus().GetCode(), op.ended
	}
	st.Elapsed = durationpb.New(end.Sub(op.started))

	return st
}

// judgeFailure sets outcome_unknown and no_effect of a failure. CutOff means that the
// driver's own answer does not count: its call was cut off, or its answer cannot be sent.
// The caller holds operations.mu.
func (op *operation) judgeFailure(result *driverv1.Result, cutOff bool) {
	// The call was cut off halfway, or one of several was refused [RESULT-3].
	own := result.GetOutcomeUnknown() || op.callBegun && (cutOff || op.callRefused)
	// This attempt ended before it knew what an earlier one did, or that one still runs
	// [RESULT-5]. A refused attempt must be retried under this id, not as another operation.
	earlier := op.callRefused || cutOff && bus.Mutates(op.operation) && op.request.GetRecover() ||
		op.recoversCreate() && !op.callBegun || op.operation == driverv1.Operation_OPERATION_CREATE && op.earlierMayRun
	result.OutcomeUnknown, result.NoEffect = own || earlier, earlier && !own
}

// recoversCreate reports whether an earlier attempt may make an instance. Then a failure
// of this one is an outcome only after a look for that instance. The next delete or
// initialize finds whatever a lost one left.
func (op *operation) recoversCreate() bool {
	return op.operation == driverv1.Operation_OPERATION_CREATE && op.request.GetRecover()
}
