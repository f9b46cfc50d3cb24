package replica

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// operations holds a replica's operations: those that run, those that have ended and are
// not acknowledged, and their slots. It decides what may begin. It is safe for concurrent
// use. Its mu also guards the mutable fields of each operation.
type operations struct {
	slots int
	log   *slog.Logger
	tasks sync.WaitGroup // running operations; added to under mu while not draining
	acked chan struct{}  // signals that a kept result was stored or acknowledged

	mu       sync.Mutex
	byID     map[string]*operation   // mutations running or not acknowledged, by cluster and operation id
	machines map[string]*operation   // running mutations, by cluster and machine uid
	reads    map[*operation]struct{} // running reads
	stuck    map[*operation]struct{} // the given up calls among machines and reads
	denials  denials
	taken    [lanes]int // occupied slots
	draining bool
	stopped  bool // no operation may begin a call
}

func newOperations(slots int, log *slog.Logger) *operations {
	return &operations{
		slots: slots, log: log, acked: make(chan struct{}, 1), denials: denials{},
		byID: map[string]*operation{}, machines: map[string]*operation{}, reads: map[*operation]struct{}{}, stuck: map[*operation]struct{}{},
	}
}

// A lane is a kind of operation with slots of its own: no lane waits for another.
type lane int

const (
	laneMakes lane = iota // creates and initializes
	laneDeletes
	laneReads
	laneGroupReads
	laneGroupEdits
	lanes
)

func (l lane) String() string {
	return [lanes]string{"creates", "deletes", "reads", "reads of node groups", "changes of node groups"}[l]
}

// laneOf returns the lane of a request.
func laneOf(request *driverv1.Envelope) lane {
	switch op := bus.OperationOf(request); {
	case op == driverv1.Operation_OPERATION_DELETE:
		return laneDeletes
	case bus.Mutates(op):
		return laneMakes
	case bus.EditsNodeGroup(request):
		return laneGroupEdits
	case op == driverv1.Operation_OPERATION_NODE_GROUPS:
		return laneGroupReads
	default:
		return laneReads
	}
}

// A refusal is why an operation does not begin; nil if it begins.
type refusal = *driverv1.BusyReason

// admit begins an operation, or returns why not. A request for a mutation that the replica
// has is attached to it: it neither begins anything nor is refused. Then known is the
// operation to answer with; it is nil while its claim is being written. Strange means that
// the sender shares no protocol version.
func (o *operations) admit(op *operation, strange bool) (known *operation, begun context.Context, why refusal) {
	o.mu.Lock()
	defer o.mu.Unlock()
	mutates := bus.Mutates(op.operation)
	var other *operation // of the machine
	if mutates {
		if known, attached := o.attachLocked(op); attached {
			return known, nil, nil
		}
		if o.denials.covers(op) {
			return nil, nil, driverv1.BusyReason_BUSY_REASON_UNSPECIFIED.Enum() // says only that nothing was done
		}
		other = o.machines[op.machineKey()]
	}
	switch {
	case strange:
		return nil, nil, driverv1.BusyReason_BUSY_REASON_PROTOCOL.Enum()
	case o.draining:
		return nil, nil, driverv1.BusyReason_BUSY_REASON_DRAINING.Enum()
	case other != nil && other.stuck:
		return nil, nil, driverv1.BusyReason_BUSY_REASON_STUCK.Enum()
	case other != nil:
		return nil, nil, driverv1.BusyReason_BUSY_REASON_MACHINE.Enum()
	case o.taken[op.lane] >= o.slots:
		return nil, nil, driverv1.BusyReason_BUSY_REASON_SLOTS.Enum()
	}
	o.taken[op.lane]++
	if mutates {
		op.claiming = true
		o.byID[op.key()] = op
		o.machines[op.machineKey()] = op
	} else {
		o.reads[op] = struct{}{}
	}

	return nil, o.beginLocked(op), nil
}

// attachLocked directs the frames of a known operation that is not outdated to the new
// asker. It returns the operation unless its claim is being written.
func (o *operations) attachLocked(op *operation) (known *operation, attached bool) {
	known, ok := o.byID[op.key()]
	if !ok || known.isOutdatedBy(op) {
		if ok && known.result != nil {
			delete(o.byID, known.key()) // a later attempt has superseded this result
		}

		return nil, false
	}
	known.reply, known.contentType, known.attempt = op.reply, op.contentType, op.attempt
	known.earlierMayRun = known.earlierMayRun || op.earlierMayRun
	known.askedAgain = known.askedAgain || !known.outcomeStored
	if known.claiming {
		known.resultSent = false

		return nil, true
	}
	known.resultSent = true // until it is accepted

	return known, true
}

// beginLocked counts an operation as running and returns its context. No cancel or drain
// can come in between.
func (o *operations) beginLocked(op *operation) context.Context {
	timeout := bus.DefaultTimeout
	if t := op.request.GetTimeout(); t.IsValid() && t.AsDuration() > 0 {
		timeout = t.AsDuration()
	}
	op.deadline = time.Now().Add(timeout)
	ctx, cancel := context.WithDeadline(context.Background(), op.deadline) //nolint:forbidigo // an operation outlives the Run that took it: drain decides
	op.cancel = cancel
	o.tasks.Add(1)

	return ctx
}

// mutatingLocked returns the number of mutations that occupy a slot.
func (o *operations) mutatingLocked() int { return o.taken[laneMakes] + o.taken[laneDeletes] }

// endClaim notes that a mutation's claim was written or, if refused, drops the mutation.
func (o *operations) endClaim(op *operation, refused bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	op.claiming = false
	if refused {
		o.freeLocked(op)
		delete(o.byID, op.key())
	}
}

// freeLocked frees what an operation occupies.
func (o *operations) freeLocked(op *operation) {
	o.taken[op.lane]--
	if bus.Mutates(op.operation) {
		delete(o.machines, op.machineKey())
	} else {
		delete(o.reads, op)
	}
}

// countRunning returns the number of running operations, including reads.
func (o *operations) countRunning() int {
	o.mu.Lock()
	defer o.mu.Unlock()

	return o.mutatingLocked() + len(o.reads)
}

// cancel ends an operation early, unless its call may be at the provider.
func (o *operations) cancel(key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	op, ok := o.byID[key]
	switch {
	case !ok || op.result != nil:
	case op.callBegun:
		o.log.Info("cancel ignored: a call to the provider may be running", "operation_id", op.id)
	default:
		o.log.Info("cancelling on request", "operation_id", op.id)
		op.cancel()
	}
}

// cancelAll cancels all running operations and returns the ids of the mutations.
func (o *operations) cancelAll() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	var ids []string
	for _, op := range o.machines {
		op.cancel()
		ids = append(ids, op.id)
	}
	for op := range o.reads {
		op.cancel()
	}
	slices.Sort(ids)

	return ids
}

// slowReads returns the reads that have run for some time without being accepted, and
// marks them accepted.
func (o *operations) slowReads(now time.Time, after time.Duration) []*operation {
	var slow []*operation
	o.mu.Lock()
	defer o.mu.Unlock()
	for op := range o.reads {
		if !op.accepted && now.Sub(op.started) > after {
			op.accepted = true
			slow = append(slow, op)
		}
	}

	return slow
}

// startDraining stops admission and returns the number of running operations.
func (o *operations) startDraining() int {
	o.mu.Lock()
	o.draining = true
	o.mu.Unlock()

	return o.countRunning()
}

// stopBegins keeps all operations from beginning a call.
func (o *operations) stopBegins() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.stopped = true
}
