package dispatch

import (
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// toldWaiting is how many waiting operations people are told of. That many fit one
// message.
const toldWaiting = 1000

// Waiting returns the operations that no driver has, and what each waits for: the
// oldest 1000, and how many more there are.
func (d *Dispatcher) Waiting() *driverv1.OpsResponse {
	type waiting struct {
		e     *entry
		state State
	}
	var all []waiting
	d.mu.Lock()
	for _, e := range d.machines {
		if !e.settled && e.state.Phase == Waiting {
			all = append(all, waiting{e, e.state})
		}
	}
	d.mu.Unlock()
	slices.SortFunc(all, func(a, b waiting) int { return a.e.started.Compare(b.e.started) })
	told := all[:min(len(all), toldWaiting)]
	response := &driverv1.OpsResponse{Omitted: uint32(len(all) - len(told))}
	for _, w := range told {
		reason := w.state.Reason
		if d.queue.holds(w.e.turn) {
			reason = d.queue.why(w.e.turn) // that of this moment
		}
		response.Operations = append(response.Operations, &driverv1.OperationState{
			OperationId: w.e.id, Attempt: w.state.Attempt, Operation: w.e.kind.wire(), Provider: w.e.provider,
			Namespace: w.e.machine.Namespace, Name: w.e.machine.Name,
			Elapsed: durationpb.New(time.Since(w.e.started)), LastProgress: reason,
		})
	}

	return response
}
