package replica

import (
	"bytes"
	"fmt"
	"runtime/pprof"
	"strconv"
	"strings"
	"time"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/opstream"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// stuckCheck is the longest time between two checks for stuck calls.
	stuckCheck = time.Second
	// operationLabel marks the goroutines of a mutation, in profiles too.
	operationLabel = "machinebus_operation"
	// maxStack bounds the logged stacks of a call's goroutines.
	maxStack = 16 << 10
)

// giveUp answers the calls that have ignored their deadlines for too long. Their later
// results do not count, see logLateReturn.
func (w *worker) giveUp(now time.Time) {
	if !w.ops.overdue(now, w.cfg.StuckAfter) {
		return
	}
	// Taken before any state changes: it may last until the next session, and a result must
	// precede a session that does not list its operation.
	profile := &bytes.Buffer{}
	_ = pprof.Lookup("goroutine").WriteTo(profile, 1) // a Buffer takes everything
	for op, result := range w.ops.giveUp(now, w.cfg.StuckAfter, w.stuckResult) {
		w.publishResult(op, result)
		w.log.Error("a driver call ignores its deadline; until it returns it occupies its slot and blocks its machine: "+
			"fix the driver, or restart this replica", "operation", bus.Verb(op.operation), "operation_id", op.id,
			"machine", op.namespace+"/"+op.name, "attempt", op.request.GetAttempt(), "elapsed", now.Sub(op.started).Round(time.Millisecond),
			"stack", stackOf(profile.String(), op.key()))
		w.ops.tasks.Done()
	}
}

func (w *worker) stuckResult(op *operation) *driverv1.Result {
	text := fmt.Sprintf("driver has not returned from %s %s after its deadline: restart replica %s, or fix the driver",
		bus.Verb(op.operation), w.cfg.StuckAfter, w.cfg.Replica)
	if bus.Mutates(op.operation) {
		text += "; until it returns only other replicas serve the machine; the replica's log has the stack"
	}

	return bus.Failure(driverv1.Code_CODE_DEADLINE_EXCEEDED, text)
}

// logLateReturn logs the result of a call that was given up.
func (w *worker) logLateReturn(op *operation, result *driverv1.Result) {
	instance, _ := opstream.InstanceOf(result)
	w.log.Warn("a driver call that ignored its deadline has returned; its slot and machine are free again",
		"operation", bus.Verb(op.operation), "operation_id", op.id, "machine", op.namespace+"/"+op.name,
		"elapsed", time.Since(op.started).Round(time.Millisecond),
		"code", bus.CodeName(result.GetStatus().GetCode()), "provider_id", instance.GetProviderId())
	w.beat.renewNow() // announces the free slot
}

// stackOf returns the stacks of one operation from a profile of all goroutines.
func stackOf(profile, operation string) string {
	label := strconv.Quote(operationLabel) + ":" + strconv.Quote(operation)
	text := ""
	for goroutine := range strings.SplitSeq(profile, "\n\n") {
		switch {
		case !strings.Contains(goroutine, label):
		case strings.Contains(goroutine, ".(*worker).handle"): // the call itself comes first
			text = goroutine + "\n" + text
		default: // goroutines that it has started, such as connections
			text += goroutine + "\n"
		}
	}
	if text == "" {
		return "not found; send SIGQUIT to end this process and print all stacks"
	}

	return text[:min(len(text), maxStack)]
}

// overdue reports whether a call has ignored its deadline for longer than some time.
func (o *operations) overdue(now time.Time, by time.Duration) bool {
	o.mu.Lock()
	defer o.mu.Unlock()

	return len(o.overdueLocked(now, by)) > 0
}

// overdueLocked returns the calls that have ignored their deadlines for longer than some
// time and were not given up yet.
func (o *operations) overdueLocked(now time.Time, by time.Duration) []*operation {
	var all []*operation
	consider := func(op *operation) {
		if !op.claiming && !op.returned && !op.stuck && now.Sub(op.deadline) >= by {
			all = append(all, op)
		}
	}
	for _, op := range o.machines {
		consider(op)
	}
	for op := range o.reads {
		consider(op)
	}

	return all
}

// stuckCalls counts the calls that ignore their deadlines, by operation.
func (o *operations) stuckCalls() map[driverv1.Operation]int {
	o.mu.Lock()
	defer o.mu.Unlock()
	count := map[driverv1.Operation]int{}
	for op := range o.stuck {
		count[op.operation]++
	}

	return count
}

// allSlotsStuck returns an error if stuck calls occupy all slots of a lane.
func (o *operations) allSlotsStuck() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	var stuck [lanes]int
	for op := range o.stuck {
		stuck[op.lane]++
		if stuck[op.lane] >= o.slots {
			return fmt.Errorf("calls that ignore their deadlines occupy all %d slots for %s: restart this replica; its log has their stacks",
				o.slots, op.lane)
		}
	}

	return nil
}

// giveUp records and returns a result for each call that has ignored its deadline for
// longer than some time. The call keeps its slot and machine.
func (o *operations) giveUp(now time.Time, by time.Duration, resultOf func(*operation) *driverv1.Result) map[*operation]*driverv1.Result {
	results := map[*operation]*driverv1.Result{}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, op := range o.overdueLocked(now, by) {
		op.stuck = true
		o.stuck[op] = struct{}{}
		results[op] = resultOf(op)
		o.recordLocked(op, results[op], true)
	}

	return results
}

// noteReturned notes that the handler has returned. If its call was given up before, it
// frees what the call occupied and returns true.
func (o *operations) noteReturned(op *operation) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	op.returned = true
	if op.stuck {
		delete(o.stuck, op)
		o.freeLocked(op)
	}

	return op.stuck
}
