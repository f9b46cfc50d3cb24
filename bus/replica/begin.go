package replica

import (
	"context"
	"fmt"
	"time"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/opstream"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// beginBound is how long a BEGUN record counts after it was sent [FENCE-2]: a process
	// that was frozen for longer may have been replaced.
	beginBound = time.Second
	// beginTries bounds how often the record is written again after that.
	beginTries = 3
)

// mayBegin lets an operation change something at the provider if the operations stream
// replaces the operation's claim by a BEGUN record [FENCE-1].
func (cs *claims) mayBegin(ctx context.Context, op *operation) error {
	if cs.unfenced {
		return cs.checkMayBegin(ctx, op, true)
	}
	op.beginning.Lock() // or two calls would take each other's record for another attempt's
	defer op.beginning.Unlock()
	for range beginTries {
		if err := cs.checkMayBegin(ctx, op, false); err != nil {
			return err
		}
		sent := time.Now()
		err := cs.writeBegun(ctx, op)
		fresh := elapsed(sent, time.Now()) <= beginBound
		_, replaced := opstream.ConflictOf(err)
		switch {
		case replaced:
			return cs.refuseBegin(op, true, "another attempt at operation %s has replaced its claim; replica %s called nothing", op.id, cs.cfg.Replica)
		case err != nil && ctx.Err() != nil:
			return cs.checkMayBegin(ctx, op, false)
		case err != nil:
			return cs.refuseBegin(op, false, "the operations stream did not store that operation %s begins; replica %s called nothing: %w",
				op.id, cs.cfg.Replica, err)
		case fresh:
			return cs.checkMayBegin(ctx, op, true)
		}
	}

	return cs.refuseBegin(op, false, "replica %s was frozen each time operation %s was about to begin; it called nothing", cs.cfg.Replica, op.id)
}

// writeBegun replaces the operation's claim by a BEGUN record.
func (cs *claims) writeBegun(ctx context.Context, op *operation) error {
	cs.ops.mu.Lock()
	expected := op.claim
	cs.ops.mu.Unlock()
	seq, err := cs.ledger(op.cluster).Put(ctx, op.claimSubject, cs.claimEnvelope(op, driverv1.Claim_STATE_BEGUN), expected, 0)
	if err != nil {
		return err
	}
	cs.ops.mu.Lock()
	cs.noteSequenceLocked(op, seq)
	cs.ops.mu.Unlock()

	return nil
}

// checkMayBegin returns why an operation must not begin anything, whatever its claim, or
// nil. With now, the operation begins if it returns nil: a later cancel has no effect.
func (cs *claims) checkMayBegin(ctx context.Context, op *operation, now bool) error {
	cs.ops.mu.Lock()
	defer cs.ops.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return bus.NewError(bus.CodeOf(err), fmt.Errorf("the call did not begin: %w", err))
	}
	if cs.ops.stopped {
		return bus.Errorf(driverv1.Code_CODE_ABORTED, "replica %s has stopped; operation %s called nothing", cs.cfg.Replica, op.id)
	}
	op.callBegun = op.callBegun || now

	return nil
}

// refuseBegin notes that a call to the provider was refused, and whether all further calls
// will be, as the operation's claim was replaced.
func (cs *claims) refuseBegin(op *operation, replaced bool, format string, args ...any) error {
	err := bus.Errorf(driverv1.Code_CODE_ABORTED, format, args...)
	cs.ops.mu.Lock()
	op.callRefused, op.fenced = true, op.fenced || replaced
	cs.ops.mu.Unlock()
	cs.log.Warn("the fence refused a call to the provider", "operation_id", op.id, "attempt", op.request.GetAttempt(), "err", err)

	return err
}

// elapsed returns the time between two moments by the clock that ran further: the
// monotonic one stops while a machine is suspended, the wall clock can be set back.
func elapsed(from, to time.Time) time.Duration {
	return max(to.Sub(from), to.Round(0).Sub(from.Round(0)))
}
