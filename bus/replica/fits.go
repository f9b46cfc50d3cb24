package replica

import (
	"fmt"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/opstream"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// resultSpace exceeds what accompanies a result: ids, names and headers in its frame, the
// operation's state in an answer to ops, the seal in its record.
const resultSpace = 4 << 10

// checkSize returns why a mutation's result cannot be sent or stored, or nil. It skips the
// many large results of reads, which send checks.
func (w *worker) checkSize(op *operation, r *driverv1.Result) error {
	if !bus.Mutates(op.operation) {
		return nil
	}
	payload, err := bus.Encode(bus.ResultFrame(r), "")
	if err != nil {
		return err
	}
	limit, remedy := int(w.conn.MaxPayload()), ", or raise max_payload"
	if limit <= 0 || limit >= opstream.MaxRecordBytes {
		limit, remedy = opstream.MaxRecordBytes, "" // the limit of a record, whatever the server accepts
	}
	limit -= min(resultSpace, limit/4)
	if len(payload) <= limit {
		return nil
	}
	_, state := opstream.InstanceOf(r)

	return fmt.Errorf("%w: %d bytes (last known state: %d bytes), limit %d: let the driver store a smaller state%s",
		bus.ErrTooLarge, len(payload), len(state), limit, remedy)
}

func unsendableResult(err error) *driverv1.Result {
	return bus.Failure(driverv1.Code_CODE_INTERNAL, "the driver's result cannot be sent: "+err.Error())
}
