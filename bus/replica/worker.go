package replica

import (
	"context"
	"fmt"
	"runtime/debug"
	"runtime/pprof"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A worker runs admitted operations in a replica's handler and sends the results. It is
// safe for concurrent use.
type worker struct {
	part

	handler Handler
	ops     *operations
	claims  *claims
	out     *outbox
	beat    *heartbeat
	waiting readQueue
}

// run runs an operation in the handler and ends it.
func (w *worker) run(ctx context.Context, op *operation) {
	defer op.cancel()
	task := &Task{
		Cluster: op.cluster, Operation: op.operation, Request: op.request, TraceParent: op.traceParent,
		worker: w, op: op, ctx: ctx,
	}
	result, own := w.handleLabeled(ctx, task)
	if w.ops.noteReturned(op) {
		w.logLateReturn(op, result)

		return
	}
	defer w.ops.tasks.Done()
	if err := w.checkSize(op, result); err != nil {
		// Before anything is sent or stored.
		result, own = unsendableResult(err), false
	}
	w.ops.recordAndFree(op, result, ctx.Err() != nil || !own)
	w.publishResult(op, result)
}

// handle calls the handler and always returns a result [RESULT-1]. Own reports whether it
// is the handler's.
func (w *worker) handle(ctx context.Context, task *Task) (result *driverv1.Result, own bool) {
	defer func() {
		if r := recover(); r != nil {
			// The value may contain credentials: it goes to the replica's log only.
			w.log.Error("driver panicked", "operation", bus.Verb(task.Operation),
				"operation_id", task.Request.GetOperationId(), "panic", fmt.Sprint(r), "stack", string(debug.Stack()))
			result, own = bus.Failure(driverv1.Code_CODE_INTERNAL,
				"driver panicked in "+bus.Verb(task.Operation)+"; the log of replica "+w.cfg.Replica+" has the stack"), false
		}
	}()
	result = w.handler.Handle(ctx, task)
	if result == nil {
		return bus.Failure(driverv1.Code_CODE_INTERNAL, "driver returned no result from "+bus.Verb(task.Operation)), false
	}
	if text := result.GetStatus().GetMessage(); len(text) > bus.MaxText || !utf8.ValidString(text) {
		// Clouds send such texts. Protobuf rejects invalid UTF-8, and mcm limits the size.
		result.Status.Message = bus.Shorten(strings.ToValidUTF8(text, "\uFFFD"))
	}

	return result, true
}

// publishResult counts, stores and sends a recorded result.
func (w *worker) publishResult(op *operation, result *driverv1.Result) {
	code, took := result.GetStatus().GetCode(), op.ended.Sub(op.started)
	w.stats.settled(endpoint{op.cluster, op.operation}, result.GetStatus(), took)
	if w.cfg.OnSettled != nil {
		w.cfg.OnSettled(op.operation, code, took)
	}
	if bus.Mutates(op.operation) {
		// Before the result: a caller that has the result must find the claim ended.
		w.claims.storeOutcome(op, result)
	}
	w.out.send(op, bus.ResultFrame(result))
	if bus.Mutates(op.operation) {
		w.beat.renewNow() // sessions do not list reads
	}
}

func (w *worker) reportProgress(op *operation, message string) {
	message = bus.OneLine(message) // each session repeats it
	w.ops.mu.Lock()
	changed := op.progress != message && op.result == nil
	if changed {
		op.progress = message
	}
	w.ops.mu.Unlock()
	if changed {
		w.out.send(op, &driverv1.Envelope{Body: &driverv1.Envelope_Progress{Progress: &driverv1.Progress{Message: message}}})
	}
}

// handleLabeled is handle with labeled goroutines, to find those that hang. It does not
// label reads, as that would slow each down.
func (w *worker) handleLabeled(ctx context.Context, task *Task) (result *driverv1.Result, own bool) {
	if !bus.Mutates(task.Operation) {
		return w.handle(ctx, task)
	}
	pprof.Do(ctx, pprof.Labels(operationLabel, task.op.key()), func(ctx context.Context) {
		result, own = w.handle(ctx, task)
	})

	return result, own
}

// claimAndRun claims an operation and runs it if the claim succeeds.
func (w *worker) claimAndRun(ctx context.Context, op *operation) {
	why := w.claims.claim(ctx, op)
	w.ops.endClaim(op, why != nil)
	if why != nil {
		op.cancel()
		w.ops.tasks.Done()
		w.out.sendBusy(op, why)
		w.beat.renewNow()

		return
	}
	w.out.send(op, acceptedFrame())
	w.run(ctx, op)
}

// acceptSlowReads sends accepted for slow reads. One scan for all is cheaper than a timer
// for each.
func (w *worker) acceptSlowReads(now time.Time) {
	for _, op := range w.ops.slowReads(now, deferredAccept) {
		w.out.send(op, acceptedFrame())
	}
}

// every calls f at an interval until ctx ends.
func every(ctx context.Context, interval time.Duration, f func(now time.Time)) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			f(now)
		}
	}
}
