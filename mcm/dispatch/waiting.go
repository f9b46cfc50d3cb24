package dispatch

import (
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// toldWaiting is how many waiting operations people are told of at most; the bus leaves
// out what does not fit one message.
const toldWaiting = 1000

// Waiting returns the operations that no driver has, those included that have not
// begun as nobody serves their provider, and what each waits for: the oldest 1000, and
// how many more there are.
func (d *Dispatcher) Waiting() *driverv1.OpsResponse {
	type waiting struct {
		since time.Time
		turn  *turn // nil without one
		told  *driverv1.OperationState
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
	for _, v := range d.vacancies {
		for _, a := range v.waiting {
			all = append(all, waiting{a.since, nil, &driverv1.OperationState{
				OperationId: a.op.ID(), Operation: a.op.Kind.wire(), Provider: v.provider,
				Namespace: a.op.Machine.Namespace, Name: a.op.Machine.Name, LastProgress: v.reason,
			}})
		}
	}
	d.mu.Unlock()
	slices.SortFunc(all, func(a, b waiting) int { return a.since.Compare(b.since) })
	told := all[:min(len(all), toldWaiting)]
	response := &driverv1.OpsResponse{Omitted: uint32(len(all) - len(told))}
	for _, w := range told {
		if w.turn != nil && d.queue.holds(w.turn) {
			w.told.LastProgress = d.queue.why(w.turn) // that of this moment
		}
		w.told.Elapsed = durationpb.New(time.Since(w.since))
		response.Operations = append(response.Operations, w.told)
	}

	return response
}
