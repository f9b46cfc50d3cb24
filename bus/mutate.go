package bus

import (
	"context"
	"time"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// findTries bounds how often the replicas are asked who holds an operation;
// each time takes at most acceptTimeout.
const findTries = 5

// mutate has an operation done that must not be done twice.
func (k *call) mutate(ctx context.Context) error {
	if k.again {
		if err := k.resume(ctx); err != nil {
			return err
		}
	}
	for {
		if k.target == "" && k.c.replicas.full(k.req.Provider) {
			return k.allBusy()
		}
		v, result, busy := k.try(ctx)
		if v == gotResult {
			return k.settle(result)
		}
		if done, err := k.after(ctx, v, busy); done {
			return err
		}
	}
}

// after decides what follows a try without a result: another one, when done is
// false, for which it has chosen number and target.
func (k *call) after(ctx context.Context, v verdict, busy driverv1.BusyReason) (done bool, err error) {
	switch v {
	case gotDown:
		return true, k.down()
	case gotNobody:
		if k.target == "" {
			return true, k.plain(ctx)
		}
		k.dead[k.target] = true // left since its last session

		return k.elsewhere()
	case gotBusy:
		if busy == driverv1.BusyReason_BUSY_REASON_MACHINE {
			return true, k.notStarted("another operation of this machine still runs at replica %s", k.out.Replica)
		}

		return k.elsewhere()
	case gotSilence:
		k.ran = k.number

		return k.find(ctx)
	case gotDeath:
		k.c.log.Warn("replica died with an operation", "operation_id", k.req.OperationID,
			"attempt", k.number, "replica", k.out.Replica)
		k.dead[k.out.Replica] = true

		return k.next(ctx)
	case gotDenial:
		return k.next(ctx)
	case gotLate:
		return true, k.late()
	default:
		return true, ctx.Err() //nolint:wrapcheck // the caller's own
	}
}

// elsewhere sends the same attempt, which nobody took, to a replica with room.
func (k *call) elsewhere() (done bool, err error) {
	k.target = k.c.replicas.pick(k.req.Provider, k.op, time.Now(), k.dead)
	if k.target == "" {
		return true, k.allBusy()
	}

	return false, nil
}

// next makes a further attempt after one that may have had an effect.
func (k *call) next(ctx context.Context) (done bool, err error) {
	if err := k.waitForIdentity(ctx); err != nil {
		return true, err
	}
	k.number, k.again = k.ran+1, true
	k.target = k.c.replicas.pick(k.req.Provider, k.op, time.Now(), k.dead)
	if k.target == "" {
		return true, k.notStarted("the replica that had the operation is gone and no other replica of provider %s has room",
			k.req.Provider)
	}

	return false, nil
}

// waitForIdentity waits, for a create that nothing identifies, until a lost
// attempt's call cannot take effect unseen any more.
func (k *call) waitForIdentity(ctx context.Context) error {
	if k.op != driverv1.Operation_OPERATION_CREATE {
		return nil
	}
	session := k.c.replicas.session(k.req.Provider)
	switch session.GetCreateIdentity() {
	case driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN, driverv1.CreateIdentity_CREATE_IDENTITY_UNIQUE_NAME:
		return nil
	default:
	}
	wait := time.NewTimer(time.Until(k.lastTry.Add(k.req.Timeout + session.GetSettleTime().AsDuration())))
	defer wait.Stop()
	k.c.log.Info("driver's creates have no identity: waiting for the lost attempt's deadline before the next",
		"operation_id", k.req.OperationID, "until", k.lastTry.Add(k.req.Timeout))
	select {
	case <-wait.C:
		return nil
	case <-ctx.Done():
		return ctx.Err() //nolint:wrapcheck // the caller's own
	}
}

// find looks for the replica that took a request without its frames reaching
// us. If every live one denies it, nothing runs and the next attempt may start.
func (k *call) find(ctx context.Context) (done bool, err error) {
	for range findTries {
		certain, asked := true, k.c.replicas.live(k.req.Provider)
		for _, id := range asked {
			answer := k.c.ask(ctx, k.req.Provider, id, k.req.OperationID)
			switch {
			case ctx.Err() != nil:
				return true, ctx.Err() //nolint:wrapcheck // the caller's own
			case answer == nil:
				certain = false
			case len(answer.GetOperations()) > 0:
				k.target = id // it attaches us to what it runs

				return false, nil
			}
		}
		if certain && len(asked) > 0 {
			return k.next(ctx)
		}
		if len(asked) == 0 {
			break
		}
	}

	return true, timeoutErrorf("no replica of provider %s says whether it took the operation", k.req.Provider)
}

// resume looks, before an operation is tried again, for the replica that holds
// it, once every live replica has had the time to say what it holds.
func (k *call) resume(ctx context.Context) error {
	warm := time.NewTimer(time.Until(k.c.started.Add(deathLimit)))
	defer warm.Stop()
	select {
	case <-warm.C:
	case <-ctx.Done():
		return ctx.Err() //nolint:wrapcheck // the caller's own
	}
	if id, attempt, ok := k.c.replicas.holding(k.req.Provider, k.req.OperationID); ok {
		k.target, k.number, k.ran = id, max(1, attempt), max(1, attempt)

		return nil
	}
	if k.req.OnlyIfHeld {
		return Errorf(driverv1.Code_CODE_NOT_FOUND, "no replica of provider %s holds the operation any more", k.req.Provider)
	}
	if len(k.c.replicas.live(k.req.Provider)) == 0 {
		return nil // a plain driver, or none: the next try finds out
	}
	_, err := k.next(ctx)

	return err
}

// late ends an operation whose holder lives but does not finish.
func (k *call) late() error {
	err := k.c.control(k.req.Provider, k.out.Replica, verbCancel, &driverv1.Envelope{
		OperationId: k.req.OperationID,
		Body:        &driverv1.Envelope_Cancel{Cancel: &driverv1.Cancel{OperationId: k.req.OperationID}},
	})
	if err != nil {
		k.c.log.Warn("late operation not cancelled", "operation_id", k.req.OperationID, "err", err)
	}

	return timeoutErrorf("replica %s did not finish within %s", k.out.Replica, k.req.Timeout)
}
