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

// setRunning records that a replica has the operation. It only notifies if the last notice was
// a reason to wait.
func (d *Dispatcher) setRunning(e *entry, attempt uint32, replica string) {
	d.mu.Lock()
	notify := e.waitReported
	e.waitReported = false
	state := State{Phase: Running, ID: e.id, Kind: e.kind, Replica: replica, Attempt: attempt, Waited: e.state.Waited}
	e.state = state
	d.mu.Unlock()
	traceAccepted(e.span, attempt, replica)
	d.log(e, &state).V(1).Info("a replica has the operation")
	if notify {
		d.notify(e.machine)
	}
	if !e.cancelled() {
		return
	}
	// Cancel was called while the request was in transit.
	if err := d.caller.Cancel(e.provider, e.id); err != nil {
		d.log(e, &state).Info("cannot cancel the operation", "err", err.Error())
	}
}

func (d *Dispatcher) progress(e *entry, message string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e.state.Progress = message
}

// setWaiting records what an operation waits for, and notifies if that has changed.
func (d *Dispatcher) setWaiting(e *entry, cause error, attempts uint32) {
	reason := cause.Error()
	d.mu.Lock()
	changed := e.state.Phase != Waiting || e.state.Reason != reason
	e.waitReported = true
	state := State{Phase: Waiting, ID: e.id, Kind: e.kind, Reason: reason, Attempt: attempts, Waited: true}
	e.state = state
	d.mu.Unlock()
	if changed {
		traceWaiting(e.span, cause)
		d.log(e, &state).Info("operation waits", "reason", reason)
		d.notify(e.machine)
	}
}

// setQueued records that an operation is back in the queue, because there was no free slot.
// awaitTurn notifies if it stays there for long.
func (d *Dispatcher) setQueued(e *entry, attempts uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e.state = State{Phase: Waiting, ID: e.id, Kind: e.kind, Attempt: attempts, Waited: e.state.Waited}
}

// finish records the outcome of an operation, publishes it and notifies.
func (d *Dispatcher) finish(e *entry, out *caller.Outcome, err error) {
	// Add the waits of earlier calls: all were before a replica took the last attempt.
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
	if e.machineGone {
		d.settleLocked(e)
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

// audit publishes the outcome of an operation.
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
		d.log(e, state).V(1).Info("cannot publish the audit message", "err", err.Error())
	}
	d.recent.add(record)
}

// settleTime returns how long the lists of a provider's drivers may lag behind their effects:
// the longest time of a live replica.
func (d *Dispatcher) settleTime(provider string) time.Duration {
	var settle time.Duration
	for _, r := range d.caller.Replicas() {
		if r.Session.GetProvider() == provider {
			settle = max(settle, caller.SettleTimeOf(r.Session))
		}
	}

	return settle
}
