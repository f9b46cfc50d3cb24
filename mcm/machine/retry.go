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

// create returns when a create that ended with code is tried again.
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

// delete returns when a delete that ended with code is tried again.
func (r Retry) delete(code dispatch.Code) time.Duration {
	if transient(code) {
		return r.Short
	}

	return r.Long
}
