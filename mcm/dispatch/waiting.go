package dispatch

import (
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// maxWaiting bounds the operations that Waiting returns. The bus omits those that do not fit
// into one message.
const maxWaiting = 1000

// Waiting returns the operations that no driver has and what each waits for, also those that
// have not begun because no driver serves their provider: the oldest 1000, and the number of
// the others.
func (d *Dispatcher) Waiting() *driverv1.OpsResponse {
	type waiting struct {
		since time.Time
		turn  *turn // nil without one
		state *driverv1.OperationState
	}
	var all []waiting
	d.mu.Lock()
	for _, e := range d.machines {
		if e.settled || e.state.Phase != Waiting {
			continue
		}
		all = append(all, waiting{e.started, e.turn, &driverv1.OperationState{
			OperationId: e.id, Attempt: e.state.Attempt, Operation: e.kind.wire(), Provider: e.provider,
			Namespace: e.machine.Namespace, Name: e.machine.Name, LastProgress: e.state.Reason,
		}})
	}
	for _, v := range d.unserved {
		for _, a := range v.waiting {
			all = append(all, waiting{a.since, nil, &driverv1.OperationState{
				OperationId: a.op.ID(), Operation: a.op.Kind.wire(), Provider: v.provider,
				Namespace: a.op.Machine.Namespace, Name: a.op.Machine.Name, LastProgress: v.reason,
			}})
		}
	}
	d.mu.Unlock()
	slices.SortFunc(all, func(a, b waiting) int { return a.since.Compare(b.since) })
	oldest := all[:min(len(all), maxWaiting)]
	response := &driverv1.OpsResponse{Omitted: uint32(len(all) - len(oldest))}
	for _, w := range oldest {
		if w.turn != nil && d.queue.contains(w.turn) {
			w.state.LastProgress = d.queue.reason(w.turn) // may be newer
		}
		w.state.Elapsed = durationpb.New(time.Since(w.since))
		response.Operations = append(response.Operations, w.state)
	}

	return response
}
