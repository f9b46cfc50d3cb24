package replica

import (
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// An outbox sends a replica's frames to the callers. It is safe for concurrent use.
type outbox struct {
	part

	ops *operations
}

func acceptedFrame() *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Accepted{Accepted: &driverv1.Accepted{}}}
}

// send publishes a frame of an operation to the last asker. A result that does not count
// yet waits until it is stored. A frame that cannot be sent is not lost: mcm sees the
// operation in the next session and asks.
func (out *outbox) send(op *operation, frame *driverv1.Envelope) {
	out.ops.mu.Lock()
	reply, contentType, attempt := op.reply, op.contentType, op.attempt
	waits := frame.GetResult() != nil && (op.resultSent || !op.resultCounts())
	op.resultSent = op.resultSent || frame.GetResult() != nil && !waits
	out.ops.mu.Unlock()
	if waits {
		return
	}
	err := out.sendTo(reply, contentType, op.id, attempt, frame)
	if frame.GetResult() == nil || !errors.Is(err, bus.ErrTooLarge) && !errors.Is(err, bus.ErrEncode) {
		return
	}
	// This result can never be sent, so mcm must not wait for it. For a mutation this happens
	// only if the server's limit was lowered.
	instead := unsendableResult(err)
	out.ops.mu.Lock()
	op.judgeFailure(instead, true)
	if op.result != nil {
		op.result = instead
	}
	if instead.GetOutcomeUnknown() && out.ops.byID[op.key()] == op {
		delete(out.ops.byID, op.key()) // [RESULT-4]
	}
	out.ops.mu.Unlock()
	_ = out.sendTo(reply, contentType, op.id, attempt, bus.ResultFrame(instead)) // it is logged
}

func (out *outbox) sendTo(reply, contentType, id string, attempt uint32, frame *driverv1.Envelope) error {
	frame.OperationId, frame.Attempt, frame.Replica = id, attempt, out.cfg.Replica
	payload, err := bus.Encode(frame, contentType)
	if err != nil {
		out.log.Error("cannot encode a reply", "operation_id", id, "err", err)

		return err
	}
	m := &nats.Msg{Subject: reply, Data: payload}
	if contentType != "" {
		m.Header = nats.Header{bus.HeaderContentType: {contentType}}
	}
	if st := frame.GetResult().GetStatus(); st.GetCode() != driverv1.Code_CODE_OK {
		if m.Header == nil {
			m.Header = nats.Header{}
		}
		m.Header[bus.HeaderErrorCode] = []string{fmt.Sprint(int32(st.GetCode()))}
		m.Header[bus.HeaderError] = []string{bus.OneLine(st.GetMessage())}
	}
	if err := out.conn.Publish(m); err != nil {
		out.log.Warn("reply not sent; mcm will ask for it", "operation_id", id, "err", err)

		return err
	}

	return nil
}

// sendBusy refuses an operation.
func (out *outbox) sendBusy(op *operation, why refusal) {
	out.stats.busy.Add(1)
	out.send(op, &driverv1.Envelope{Body: &driverv1.Envelope_Busy{Busy: &driverv1.Busy{Reason: *why}}})
}

// resend sends a caller that was attached to an operation what it has.
func (out *outbox) resend(known *operation) {
	out.send(known, acceptedFrame())
	out.ops.mu.Lock()
	known.resultSent = false
	result := known.result
	out.ops.mu.Unlock()
	if result != nil {
		out.send(known, bus.ResultFrame(result))
	}
}
