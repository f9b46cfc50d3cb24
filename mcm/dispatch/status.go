package dispatch

import (
	"context"
	"fmt"
	"math/rand/v2"

	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
)

// Status finds a machine's instance. It changes nothing, so it has no number and no place in
// the journal; see [Dispatcher.Ask].
const Status Kind = "status"

// A reading is one Status request. Dispatcher.mu guards its state.
type reading struct {
	op     Operation
	state  State
	cancel context.CancelFunc
}

// Ask asks a driver for a machine's instance, unless a request is in flight, and returns the
// request's state. It never blocks. It returns a Done answer once; the next Ask sends a new
// request. Its Err may come with an Instance.
func (d *Dispatcher) Ask(op Operation) State {
	uid := op.Machine.UID
	op.Kind = Status
	d.mu.Lock()
	defer d.mu.Unlock()
	if r, ok := d.readings[uid]; ok {
		if r.op.Provider == op.Provider && r.state.Phase != Done {
			return r.state
		}
		r.cancel()
		delete(d.readings, uid)
		if r.op.Provider == op.Provider {
			return r.state
		}
	}
	ctx, cancel := context.WithCancel(d.ctx)
	id := fmt.Sprintf("%s.%s.%x", uid, Status, rand.Uint64())
	r := &reading{op: op, cancel: cancel, state: State{Phase: Waiting, ID: id, Kind: Status}}
	d.readings[uid] = r
	req := caller.Request{
		Provider: op.Provider, Namespace: op.Machine.Namespace, Name: op.Machine.Name,
		OperationID: id, Body: request(&op), Timeout: op.Timeout,
	}
	d.running.Go(func() {
		defer cancel()
		d.read(ctx, r, req)
	})

	return r.state
}

// read sends a request until a driver answers it.
func (d *Dispatcher) read(ctx context.Context, r *reading, req caller.Request) {
	defer d.metrics.started(req.Provider, Status)()
	name := types.NamespacedName{Namespace: req.Namespace, Name: req.Name}
	for {
		room := d.caller.Room(req.Provider)
		out, err := d.caller.Call(ctx, req)
		if ctx.Err() != nil {
			return
		}
		state := State{Phase: Waiting, ID: req.OperationID, Kind: Status, Waited: true}
		if bus.NothingRan(err) && CodeOf(err) != InvalidArgument {
			state.Reason = err.Error()
		} else {
			state = State{
				Phase: Done, ID: req.OperationID, Kind: Status, Replica: out.Replica, Attempt: out.Attempts, Err: err, Took: out.Took,
			}
			state.Instance, _, _ = payload(out.Result)
			d.metrics.finished(req.Provider, Status, err, out)
		}
		d.mu.Lock()
		news := r.state.Phase != state.Phase || r.state.Reason != state.Reason
		r.state = state
		d.mu.Unlock()
		if news {
			d.notify(name)
		}
		if state.Phase == Done || !d.pause(room, ctx.Done(), retryWait) {
			return
		}
	}
}

// stopReadingLocked cancels the request for a machine. The caller holds d.mu.
func (d *Dispatcher) stopReadingLocked(uid types.UID) {
	if r, ok := d.readings[uid]; ok {
		r.cancel()
		delete(d.readings, uid)
	}
}
