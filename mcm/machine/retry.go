package machine

import (
	"time"

	"github.com/machinebus/machinebus/mcm/dispatch"
)

// transient are the codes after which trying again soon may well help. Canceled
// is one of them: it is a replica that stops, or ourselves, and never the cloud.
func transient(code dispatch.Code) bool {
	switch code {
	case dispatch.Canceled, dispatch.Unknown, dispatch.DeadlineExceeded, dispatch.Aborted, dispatch.Unavailable:
		return true
	default:
		return false
	}
}

// create returns how long mcm waits after a create that ended with code. A driver's own
// retry_after replaces it (operations.operationFailed), and a change of the class or its secrets
// ends the wait.
func (r Retry) create(code dispatch.Code) time.Duration {
	switch {
	case code == dispatch.ResourceExhausted:
		return r.ResourceExhausted
	case transient(code):
		return r.Short
	default:
		return r.Medium
	}
}

// delete returns how long mcm waits after a delete that ended with code, as create does.
func (r Retry) delete(code dispatch.Code) time.Duration {
	if transient(code) {
		return r.Short
	}

	return r.Long
}
