package dispatch

import (
	"errors"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// accepted notes that a replica has the operation. That is news only for a
// controller that was told of a reason to wait.
func (d *Dispatcher) accepted(e *entry, attempt uint32, replica string) {
	d.mu.Lock()
	news := e.told
	e.told = false
	state := State{Phase: Running, ID: e.id, Kind: e.kind, Replica: replica, Attempt: attempt, Waited: e.state.Waited}
	e.state = state
	d.mu.Unlock()
	traceAccepted(e.span, attempt, replica)
	d.log(e, &state).V(1).Info("a replica has the operation")
	if news {
		d.notify(e.machine)
	}
	if !e.cancelled() {
		return
	}
	// The request was on its way, where it could not be cancelled.
	if err := d.caller.Cancel(e.provider, e.id); err != nil {
		d.log(e, &state).Info("operation not cancelled", "err", err.Error())
	}
}

func (d *Dispatcher) progress(e *entry, message string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e.state.Progress = message
}

// waiting notes what an operation waits for, and notifies when that is news.
func (d *Dispatcher) waiting(e *entry, cause error, attempts uint32) {
	reason := cause.Error()
	d.mu.Lock()
	news := e.state.Phase != Waiting || e.state.Reason != reason
	e.told = true
	state := State{Phase: Waiting, ID: e.id, Kind: e.kind, Reason: reason, Attempt: attempts, Waited: true}
	e.state = state
	d.mu.Unlock()
	if news {
		traceWaiting(e.span, cause)
		d.log(e, &state).Info("operation waits", "reason", reason)
		d.notify(e.machine)
	}
}

// queued notes that an operation is back in the queue, for which there was no slot.
// That is no news: all others wait for the same, and awaitTurn says so when it takes
// long.
func (d *Dispatcher) queued(e *entry, attempts uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e.state = State{Phase: Waiting, ID: e.id, Kind: e.kind, Attempt: attempts, Waited: e.state.Waited}
}

// finish notes what an operation came to, and tells everybody.
func (d *Dispatcher) finish(e *entry, out *caller.Outcome, err error) {
	// Earlier calls have waited as well; all of it was before a replica took this
	// last try.
	out.Waited = max(out.Waited, time.Since(e.started)-out.Took)
	state := State{
		Phase: Done, ID: e.id, Kind: e.kind, Replica: out.Replica, Attempt: out.Attempts, Err: err, Took: out.Took,
		Lost: errors.Is(err, caller.ErrNotHeld), SettleTime: d.settleTime(e.provider),
		Provider: e.provider, ClassGeneration: e.class,
	}
	state.Instance, state.LastKnownState, state.Stated = payload(out.Result)
	state.Stated = state.Stated && !out.Partial
	d.mu.Lock()
	e.state = state
	if !out.Plain {
		e.holder = out.Replica
	}
	if e.gone {
		d.release(e)
		delete(d.machines, e.uid)
	}
	d.mu.Unlock()
	d.metrics.finished(e.provider, e.kind, err, out)
	traceEnd(e.span, &state)
	d.log(e, &state).Info("operation ended", "code", CodeOf(err).String(),
		"waited", out.Waited.String(), "took", out.Took.String())
	d.audit(e, &state, out)
	d.notify(e.machine)
}

// audit publishes what became of an operation. Nobody has to listen.
func (d *Dispatcher) audit(e *entry, state *State, out *caller.Outcome) {
	record := &driverv1.Audit{
		OperationId: e.id, Operation: e.kind.wire(), Provider: e.provider,
		Namespace: e.machine.Namespace, Name: e.machine.Name,
		Attempts: out.Attempts, Replica: out.Replica, Status: bus.StatusOf(state.Err),
		StartedAt: timestamppb.New(e.started), Waited: durationpb.New(out.Waited), Took: durationpb.New(out.Took),
	}
	if state.Instance != nil {
		record.ProviderId = state.Instance.ProviderID
	}
	if err := d.auditor.Audit(record); err != nil {
		d.log(e, state).V(1).Info("audit message not sent", "err", err.Error())
	}
	d.recent.add(record)
}

// settleTime is how long the lists of a provider's drivers may lag behind their
// effects: the longest that a live replica says.
func (d *Dispatcher) settleTime(provider string) time.Duration {
	var settle time.Duration
	for _, r := range d.caller.Replicas() {
		if r.Session.GetProvider() == provider {
			settle = max(settle, caller.SettleTimeOf(r.Session))
		}
	}

	return settle
}
