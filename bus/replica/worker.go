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

// A worker has a replica's handler do what was admitted, and passes on what comes of it.
// It is safe for concurrent use.
type worker struct {
	part

	handler Handler
	ops     *operations
	claims  *claims
	out     *outbox
	beat    *heartbeat
	waiting readQueue
}

// run has the handler do an operation that has begun, and settles it.
func (w *worker) run(ctx context.Context, h *operation) {
	defer h.cancel()
	task := &Task{
		Cluster: h.cluster, Operation: h.operation, Request: h.request, TraceParent: h.traceParent,
		worker: w, op: h, ctx: ctx,
	}
	result, told := w.handleLabeled(ctx, task)
	if w.ops.noteReturned(h) {
		w.logLateReturn(h, result)

		return
	}
	defer w.ops.tasks.Done()
	if err := w.checkSize(h, result); err != nil {
		// Found out ahead of all who are to hear of it, and of the stream.
		result, told = unsendableResult(err), false
	}
	w.endOperation(h, result, ctx.Err() != nil || !told)
}

// handle calls the handler and makes a result of whatever comes of it [RESULT-1]. Told
// is false for one that is not the handler's.
func (w *worker) handle(ctx context.Context, task *Task) (result *driverv1.Result, told bool) {
	defer func() {
		if r := recover(); r != nil {
			// The value may hold anything, credentials included: it stays in the
			// replica's own log.
			w.log.Error("driver panicked", "operation", bus.Verb(task.Operation),
				"operation_id", task.Request.GetOperationId(), "panic", fmt.Sprint(r), "stack", string(debug.Stack()))
			result, told = bus.Failure(driverv1.Code_CODE_INTERNAL,
				"driver panicked in "+bus.Verb(task.Operation)+"; the log of replica "+w.cfg.Replica+" has the stack"), false
		}
	}()
	result = w.handler.Handle(ctx, task)
	if result == nil {
		return bus.Failure(driverv1.Code_CODE_INTERNAL, "driver returned no result from "+bus.Verb(task.Operation)), false
	}
	if text := result.GetStatus().GetMessage(); len(text) > bus.MaxText || !utf8.ValidString(text) {
		// Clouds send such. Protobuf does not carry it, or mcm would not take more of it.
		result.Status.Message = bus.Shorten(strings.ToValidUTF8(text, "\uFFFD"))
	}

	return result, true
}

// endOperation records the result, of which doubt judges, and sends it. A mutation's is kept
// until mcm has stored it.
func (w *worker) endOperation(h *operation, result *driverv1.Result, cutOff bool) {
	w.ops.recordAndFree(h, result, cutOff)
	w.publishResult(h, result)
}

// publishResult lets everybody know of the result that note has recorded.
func (w *worker) publishResult(h *operation, result *driverv1.Result) {
	code, took := result.GetStatus().GetCode(), h.ended.Sub(h.started)
	w.stats.settled(endpoint{h.cluster, h.operation}, result.GetStatus(), took)
	if w.cfg.OnSettled != nil {
		w.cfg.OnSettled(h.operation, code, took)
	}
	if bus.Mutates(h.operation) {
		// Ahead of the result: whoever has that finds the claim ended.
		w.claims.storeOutcome(h, result)
	}
	w.out.send(h, bus.ResultFrame(result))
	if bus.Mutates(h.operation) {
		w.beat.renewNow() // reads are in no session
	}
}

func (w *worker) reportProgress(h *operation, message string) {
	message = bus.OneLine(message) // each session repeats it
	w.ops.mu.Lock()
	changed := h.progress != message && h.result == nil
	if changed {
		h.progress = message
	}
	w.ops.mu.Unlock()
	if changed {
		w.out.send(h, &driverv1.Envelope{Body: &driverv1.Envelope_Progress{Progress: &driverv1.Progress{Message: message}}})
	}
}

// handleLabeled is handle with goroutines that can be told from others, should they hang.
// Reads are many, and each would be slower for it.
func (w *worker) handleLabeled(ctx context.Context, task *Task) (result *driverv1.Result, told bool) {
	if !bus.Mutates(task.Operation) {
		return w.handle(ctx, task)
	}
	pprof.Do(ctx, pprof.Labels(operationLabel, task.op.key()), func(ctx context.Context) {
		result, told = w.handle(ctx, task)
	})

	return result, told
}

// claimAndRun runs an operation once the operations stream says that it is ours.
func (w *worker) claimAndRun(ctx context.Context, h *operation) {
	why := w.claims.claim(ctx, h)
	w.ops.endClaim(h, why != nil)
	if why != nil {
		h.cancel()
		w.ops.tasks.Done()
		w.out.sendBusy(h, why)
		w.beat.renewNow()

		return
	}
	w.out.send(h, acceptedFrame())
	w.run(ctx, h)
}

// acceptSlowReads tells mcm who has a read that takes its time. One scan for
// all is cheaper than a timer for each.
func (w *worker) acceptSlowReads(ctx context.Context) {
	tick := time.NewTicker(deferredAccept / 2)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			for _, h := range w.ops.slowReads(now, deferredAccept) {
				w.out.send(h, acceptedFrame())
			}
		}
	}
}
