package bus

import (
	"bytes"
	"context"
	"fmt"
	"runtime/pprof"
	"strconv"
	"strings"
	"time"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// stuckCheck is the longest time between two looks for calls that ignore their
	// deadlines.
	stuckCheck = time.Second
	// operationLabel marks the goroutines of a mutation, in profiles too.
	operationLabel = "machinebus_operation"
	// maxStack bounds what the log gets of a call's goroutines.
	maxStack = 16 << 10
)

// giveUpStuck looks for calls that ignore their deadlines until ctx ends.
func (w *worker) giveUpStuck(ctx context.Context) {
	tick := time.NewTicker(min(stuckCheck, w.cfg.StuckAfter))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			w.giveUp(now)
		}
	}
}

// giveUp answers the calls that have ignored their deadlines for too long. Their late
// results count for nothing, see lateReturn.
func (w *worker) giveUp(now time.Time) {
	if !w.ops.overdue(now, w.cfg.StuckAfter) {
		return
	}
	// Before anything is noted: that takes long enough for a session to be sent, and a
	// result is to come ahead of a session that does not list its operation.
	profile := &bytes.Buffer{}
	_ = pprof.Lookup("goroutine").WriteTo(profile, 1) // a Buffer takes everything
	for h, result := range w.ops.giveUp(now, w.cfg.StuckAfter, w.stuckResult) {
		w.tell(h, result)
		w.log.Error("a driver call ignores its deadline; until it returns it keeps its slot, and other mutations from its machine: "+
			"mend the driver, or restart this replica", "operation", Verb(h.operation), "operation_id", h.id,
			"machine", h.namespace+"/"+h.name, "attempt", h.request.GetAttempt(), "elapsed", now.Sub(h.started).Round(time.Millisecond),
			"stack", stackOf(profile.String(), h.key()))
		w.ops.tasks.Done()
	}
}

func (w *worker) stuckResult(h *held) *driverv1.Result {
	text := fmt.Sprintf("driver has not returned from %s %s after its deadline: restart replica %s, or mend the driver",
		Verb(h.operation), w.cfg.StuckAfter, w.cfg.Replica)
	if Mutates(h.operation) {
		text += "; until it returns only other replicas do anything for the machine; the replica's log has the stack"
	}

	return failure(driverv1.Code_CODE_DEADLINE_EXCEEDED, text)
}

// lateReturn logs what came of a call that was given up before.
func (w *worker) lateReturn(h *held, result *driverv1.Result) {
	instance, _ := createdOf(result)
	w.log.Warn("a driver call that ignored its deadline has returned; its slot and machine are free again",
		"operation", Verb(h.operation), "operation_id", h.id, "machine", h.namespace+"/"+h.name,
		"elapsed", time.Since(h.started).Round(time.Millisecond),
		"code", CodeName(result.GetStatus().GetCode()), "provider_id", instance.GetProviderId())
	w.beat.renewNow() // who waits for the slot learns of it
}

// stackOf returns what a profile of all goroutines says of those of one operation.
func stackOf(profile, operation string) string {
	label := strconv.Quote(operationLabel) + ":" + strconv.Quote(operation)
	text := ""
	for goroutine := range strings.SplitSeq(profile, "\n\n") {
		switch {
		case !strings.Contains(goroutine, label):
		case strings.Contains(goroutine, ".(*worker).handle"): // the call itself comes first
			text = goroutine + "\n" + text
		default: // what it has started, such as connections
			text += goroutine + "\n"
		}
	}
	if text == "" {
		return "not known; SIGQUIT ends this process and prints all stacks"
	}

	return text[:min(len(text), maxStack)]
}
