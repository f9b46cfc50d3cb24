package bus

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// keptResults and keptFor bound the results kept for an mcm that is away.
	keptResults = 2048
	keptFor     = 24 * time.Hour
)

// operations are what a replica has in hand: what runs, what has settled and is not
// acknowledged, and the slots that this takes. It decides what may begin. It is safe for
// concurrent use, and its mu guards each held's fields that change as well.
type operations struct {
	slots int
	log   *slog.Logger
	tasks sync.WaitGroup // of what runs; added to under mu while not draining
	acked chan struct{}  // signals that a kept result went

	mu       sync.Mutex
	held     map[string]*held   // mutations running or not acknowledged, by cluster and operation id
	machines map[string]*held   // running mutations, by cluster and machine uid
	reads    map[*held]struct{} // running reads
	stuck    map[*held]struct{} // of machines and reads, calls that were given up
	denials  denials
	running  int // mutations that occupy a slot
	deleting int // those of them that are deletes
	draining bool
	stopped  bool // nothing is begun any more
}

func newOperations(slots int, log *slog.Logger) *operations {
	return &operations{
		slots: slots, log: log, acked: make(chan struct{}, 1), denials: denials{},
		held: map[string]*held{}, machines: map[string]*held{}, reads: map[*held]struct{}{}, stuck: map[*held]struct{}{},
	}
}

// A refusal is why an operation does not begin; nil if it does.
type refusal = *driverv1.BusyReason

// admitRead begins a read, or returns why not.
func (o *operations) admitRead(h *held, strange bool) (context.Context, refusal) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case strange:
		return nil, driverv1.BusyReason_BUSY_REASON_PROTOCOL.Enum()
	case o.draining:
		return nil, driverv1.BusyReason_BUSY_REASON_DRAINING.Enum()
	case len(o.reads) >= o.slots:
		return nil, driverv1.BusyReason_BUSY_REASON_SLOTS.Enum()
	}
	o.reads[h] = struct{}{}

	return o.beginLocked(h), nil
}

// admit begins a mutation, or returns why not. An operation that is here already is known:
// the request is attached to it, and neither begins anything nor is refused. Strange says
// that its sender shares no version of the protocol.
func (o *operations) admit(h *held, strange bool) (known *held, begun context.Context, why refusal) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if known := o.attachLocked(h); known != nil {
		return known, nil, nil
	}
	other := o.machines[h.machineKey()]
	switch {
	case o.denials.covers(h):
		return nil, nil, driverv1.BusyReason_BUSY_REASON_UNSPECIFIED.Enum() // it says only that nothing was done
	case strange:
		return nil, nil, driverv1.BusyReason_BUSY_REASON_PROTOCOL.Enum()
	case o.draining:
		return nil, nil, driverv1.BusyReason_BUSY_REASON_DRAINING.Enum()
	case other != nil && other.stuck:
		return nil, nil, driverv1.BusyReason_BUSY_REASON_STUCK.Enum()
	case other != nil:
		return nil, nil, driverv1.BusyReason_BUSY_REASON_MACHINE.Enum()
	case o.takenLocked(h.operation) >= o.slots:
		return nil, nil, driverv1.BusyReason_BUSY_REASON_SLOTS.Enum()
	}
	h.claiming = true
	o.occupyLocked(h.operation, 1)
	o.held[h.key()] = h
	o.machines[h.machineKey()] = h

	return nil, o.beginLocked(h), nil
}

// attachLocked has the frames of an operation that is here already go to whoever asks for
// it now. It returns nil when it is not here, or no longer counts.
func (o *operations) attachLocked(h *held) *held {
	known, ok := o.held[h.key()]
	if !ok || known.outdated(h) {
		if ok && known.result != nil {
			delete(o.held, known.key()) // what another attempt has superseded is no answer
		}

		return nil
	}
	known.reply, known.contentType, known.attempt = h.reply, h.contentType, h.attempt
	known.earlierMayRun = known.earlierMayRun || h.earlierMayRun
	known.askedAgain = known.askedAgain || !known.stored
	known.answered = !known.claiming // until it is accepted

	return known
}

// beginLocked counts an operation as running and returns its context. Neither a cancel
// nor a drain can slip in between.
func (o *operations) beginLocked(h *held) context.Context {
	timeout := defaultTimeout
	if t := h.request.GetTimeout(); t.IsValid() && t.AsDuration() > 0 {
		timeout = t.AsDuration()
	}
	h.deadline = time.Now().Add(timeout)
	ctx, cancel := context.WithDeadline(context.Background(), h.deadline) //nolint:forbidigo // an operation outlives the Run that took it: drain decides
	h.cancel = cancel
	o.tasks.Add(1)

	return ctx
}

// occupyLocked counts a mutation that begins, or with -1 one that has ended.
func (o *operations) occupyLocked(op driverv1.Operation, by int) {
	o.running += by
	if op == driverv1.Operation_OPERATION_DELETE {
		o.deleting += by
	}
}

// takenLocked is how many of the slots that an operation could have are not free.
func (o *operations) takenLocked(op driverv1.Operation) int {
	if op == driverv1.Operation_OPERATION_DELETE {
		return o.deleting
	}

	return o.running - o.deleting
}

// endClaim ends the wait for the claim of a mutation, which is given back if that was
// refused.
func (o *operations) endClaim(h *held, refused bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	h.claiming = false
	if refused {
		o.freeLocked(h)
		delete(o.held, h.key())
	}
}

// freeLocked gives back what an operation occupies.
func (o *operations) freeLocked(h *held) {
	if !Mutates(h.operation) {
		delete(o.reads, h)

		return
	}
	o.occupyLocked(h.operation, -1)
	delete(o.machines, h.machineKey())
}

// end records the result of an operation, of which doubt judges, and gives back what it
// occupies.
func (o *operations) end(h *held, result *driverv1.Result, cutOff bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.recordLocked(h, result, cutOff)
	o.freeLocked(h)
}

// recordLocked records a result.
func (o *operations) recordLocked(h *held, result *driverv1.Result, cutOff bool) {
	now := time.Now()
	if result.GetStatus().GetCode() != driverv1.Code_CODE_OK {
		h.doubt(result, cutOff)
	}
	h.result, h.ended = result, now
	if Mutates(h.operation) {
		if result.GetOutcomeUnknown() {
			delete(o.held, h.key()) // to be tried again under this very id [RESULT-4]
		}
		o.forgetOldLocked(now)
	}
}

// forgetOldLocked bounds what is kept for an mcm that never acknowledges.
func (o *operations) forgetOldLocked(now time.Time) {
	var oldest *held
	settled := 0
	for key, h := range o.held {
		switch {
		case h.result == nil:
			continue
		case now.Sub(h.ended) > keptFor:
			delete(o.held, key)

			continue
		}
		settled++
		if oldest == nil || h.ended.Before(oldest.ended) {
			oldest = h
		}
	}
	if settled > keptResults {
		o.log.Warn("too many results that mcm did not acknowledge; forgetting the oldest", "operation_id", oldest.id)
		delete(o.held, oldest.key())
	}
}

// acknowledge forgets a result that mcm has stored, once its claim has ended, too: nothing
// else would end that.
func (o *operations) acknowledge(key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	h, ok := o.held[key]
	switch {
	case !ok || h.result == nil:
	case !h.stored:
		h.known = true
	default:
		delete(o.held, key)
	}
	signal(o.acked)
}

// answer returns what this replica has of a control plane's operations, or of the one
// wanted. It takes no attempt any more that it does not have then [OPS-1].
func (o *operations) answer(cluster, want string, attempt uint32, now time.Time) *driverv1.OpsResponse {
	answer, denied := &driverv1.OpsResponse{}, true
	o.mu.Lock()
	defer o.mu.Unlock()
	if want == "" {
		answer.Operations = o.statesLocked(cluster, now)

		return answer
	}
	if h, ok := o.held[cluster+"/"+want]; ok {
		st := h.state(now)
		answer.Operations = append(answer.Operations, st)
		denied = st.GetFenced() // mcm goes on from it as from what is not here
		if h.counts() {
			answer.Result = h.result
		}
	}
	if denied && attempt > 0 {
		o.denials.add(cluster+"/"+want, attempt, now)
	}

	return answer
}

// statesLocked lists a control plane's mutations, with the calls that ignore their
// deadlines.
func (o *operations) statesLocked(cluster string, now time.Time) []*driverv1.OperationState {
	var states []*driverv1.OperationState
	for _, h := range o.held {
		if h.cluster == cluster {
			states = append(states, h.state(now))
		}
	}
	for h := range o.stuck {
		if h.cluster == cluster && Mutates(h.operation) {
			states = append(states, &driverv1.OperationState{
				OperationId: h.id, Attempt: h.attempt, Operation: h.operation, Namespace: h.namespace, Name: h.name,
				Elapsed: durationpb.New(now.Sub(h.started)), Stuck: true, LastProgress: "ignores its deadline; the replica's log has the stack",
			})
		}
	}

	return states
}

// unstored returns the results of a control plane's mutations that the operations stream
// does not have, and that were last sent there longer than some time ago.
func (o *operations) unstored(cluster string, now time.Time, ago time.Duration) map[*held]*driverv1.Result {
	unstored := map[*held]*driverv1.Result{}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, h := range o.held {
		if h.cluster == cluster && h.result != nil && !h.stored && now.Sub(h.storedAt) > ago {
			unstored[h] = h.result
		}
	}

	return unstored
}

// unstoredResults is how many results the operations streams do not have.
func (o *operations) unstoredResults() int {
	n := 0
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, h := range o.held {
		if h.result != nil && !h.stored {
			n++
		}
	}

	return n
}

// overdue reports whether a call has ignored its deadline for longer than some time.
func (o *operations) overdue(now time.Time, by time.Duration) bool {
	o.mu.Lock()
	defer o.mu.Unlock()

	return len(o.overdueLocked(now, by)) > 0
}

// overdueLocked returns the calls that have ignored their deadlines for longer than some
// time and were not given up yet.
func (o *operations) overdueLocked(now time.Time, by time.Duration) []*held {
	var all []*held
	consider := func(h *held) {
		if !h.claiming && !h.returned && !h.stuck && now.Sub(h.deadline) >= by {
			all = append(all, h)
		}
	}
	for _, h := range o.machines {
		consider(h)
	}
	for h := range o.reads {
		consider(h)
	}

	return all
}

// stuckCalls counts the calls that ignore their deadlines, by operation.
func (o *operations) stuckCalls() map[driverv1.Operation]int {
	o.mu.Lock()
	defer o.mu.Unlock()
	count := map[driverv1.Operation]int{}
	for h := range o.stuck {
		count[h.operation]++
	}

	return count
}

// jammed returns an error when calls that ignore their deadlines have all slots for some
// operations, nil otherwise.
func (o *operations) jammed() error {
	taken := map[string]int{}
	for op, calls := range o.stuckCalls() {
		kind := "creates"
		switch {
		case !Mutates(op):
			kind = "reads"
		case op == driverv1.Operation_OPERATION_DELETE:
			kind = "deletes"
		}
		if taken[kind] += calls; taken[kind] >= o.slots {
			return fmt.Errorf("all %d slots for %s are taken by calls that ignore their deadlines: restart this replica; its log has their stacks",
				o.slots, kind)
		}
	}

	return nil
}

// inHand is how many operations run at this moment, reads included.
func (o *operations) inHand() int {
	o.mu.Lock()
	defer o.mu.Unlock()

	return o.running + len(o.reads)
}

// cancel ends an operation early, unless its call may be at the provider.
func (o *operations) cancel(key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	h, ok := o.held[key]
	switch {
	case !ok || h.result != nil:
	case h.begun:
		o.log.Info("cancel comes too late: the provider is at it", "operation_id", h.id)
	default:
		o.log.Info("cancelling on request", "operation_id", h.id)
		h.cancel()
	}
}

// cancelAll cancels what runs, and names the mutations among it.
func (o *operations) cancelAll() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	var ids []string
	for _, h := range o.machines {
		h.cancel()
		ids = append(ids, h.id)
	}
	for h := range o.reads {
		h.cancel()
	}
	slices.Sort(ids)

	return ids
}

// slowReads returns the reads that have run for some time and were not accepted yet, which
// they are with that.
func (o *operations) slowReads(now time.Time, after time.Duration) []*held {
	var slow []*held
	o.mu.Lock()
	defer o.mu.Unlock()
	for h := range o.reads {
		if !h.accepted && now.Sub(h.started) > after {
			h.accepted = true
			slow = append(slow, h)
		}
	}

	return slow
}

// giveUp records a result for each call that has ignored its deadline for longer than some
// time, and returns these. The call itself keeps what it occupies.
func (o *operations) giveUp(now time.Time, by time.Duration, resultOf func(*held) *driverv1.Result) map[*held]*driverv1.Result {
	results := map[*held]*driverv1.Result{}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, h := range o.overdueLocked(now, by) {
		h.stuck = true
		o.stuck[h] = struct{}{}
		results[h] = resultOf(h)
		o.recordLocked(h, results[h], true)
	}

	return results
}

// unstick notes that the handler has returned. It reports whether its call was given up
// before, and gives back what that has occupied.
func (o *operations) unstick(h *held) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	h.returned = true
	if h.stuck {
		delete(o.stuck, h)
		o.freeLocked(h)
	}

	return h.stuck
}

// drain has nothing more admitted, and returns how many operations run.
func (o *operations) drain() int {
	o.mu.Lock()
	o.draining = true
	o.mu.Unlock()

	return o.inHand()
}

// stop has no operation begin a call any more.
func (o *operations) stop() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.stopped = true
}
