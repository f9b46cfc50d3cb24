package machine

import (
	"context"
	"sync"
	"time"

	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/steps"
)

// inquiry asks a driver for a machine's instance.
type inquiry struct {
	*object
	class      *machineClass
	ops        *operations
	dispatcher Dispatcher
	unfound    *sync.Map // a failedStatus by its machine's uid
}

// A failedStatus says until when a machine's instance is not asked for again:
// passes have other causes than that, and reads have no journal. With another
// class, or for another purpose, there is no need to wait.
type failedStatus struct {
	until   time.Time
	class   string
	leaving bool
}

// askForInstance has the driver asked for the machine's instance. It lets the step go on
// only when there is an answer.
func (q *inquiry) askForInstance(ctx context.Context) (dispatch.State, steps.Next, error) {
	if d := q.failureCountsFor(); d > 0 {
		return dispatch.State{}, steps.Again(d), nil
	}
	q.unfound.Delete(q.machine.UID)
	state := q.dispatcher.Ask(dispatch.Operation{
		Machine: q.ops.machineFor(q.class.provider), Class: q.class.Class, Provider: q.class.provider, Timeout: q.settings.ReadTimeout,
	})
	if state.Phase != dispatch.Done {
		return state, steps.Wait, q.ops.reportWaiting(ctx, state)
	}

	return state, steps.Proceed, nil
}

// failureCountsFor is how long the last failure to find the machine's instance
// still counts; 0 when there was none.
func (q *inquiry) failureCountsFor() time.Duration {
	last, _ := q.unfound.Load(q.machine.UID)
	f, _ := last.(failedStatus)
	if f.class != q.class.version || f.leaving != q.leaving() {
		return 0
	}

	return max(0, f.until.Sub(q.now))
}

// retryLater stores why a machine's instance is not known, which the step has put
// into the status, and asks again later.
func (q *inquiry) retryLater(ctx context.Context, state dispatch.State, retry time.Duration) (steps.Next, error) {
	if own := dispatch.RetryAfter(state.Err); own > 0 {
		retry = own
	}
	if err := q.patchStatus(ctx); err != nil {
		return steps.Wait, err
	}
	q.unfound.Store(q.machine.UID, failedStatus{q.now.Add(retry), q.class.version, q.leaving()})
	q.warnf("FailedStatus", "%s failed with %s (driver replica %s), next try in %s: %s", state.Kind,
		dispatch.CodeOf(state.Err), orPlain(state.Replica), retry, fault(state.Err))

	return steps.Again(retry), nil
}
