package virtual

import (
	"errors"
	"net"
	"net/http"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/driversdk"
)

// codes say what the cloud's refusals mean to the manager.
var codes = map[string]driversdk.Code{
	cloudapi.CodeInvalidArgument: driversdk.InvalidArgument,
	cloudapi.CodeUnauthorized:    driversdk.Unauthenticated,
	cloudapi.CodeQuotaExceeded:   driversdk.ResourceExhausted,
	cloudapi.CodeNotFound:        driversdk.NotFound,
	cloudapi.CodeAlreadyExists:   driversdk.AlreadyExists,
	cloudapi.CodeTokenMismatch:   driversdk.AlreadyExists,
	// The next operation comes with another token.
	cloudapi.CodeTokenUsed: driversdk.Aborted,
	// Somebody else is at it, such as the other one of two deletes.
	cloudapi.CodeConflict:        driversdk.Aborted,
	cloudapi.CodeRequestTooLarge: driversdk.InvalidArgument,
	// Not ResourceExhausted: that would make an autoscaler give the node group up.
	cloudapi.CodeRateLimited: driversdk.Unavailable,
	cloudapi.CodeInternal:    driversdk.Internal,
	cloudapi.CodeUnavailable: driversdk.Unavailable,
}

// coded gives an error of the cloud's client a code. One that has a code already, such
// as the SDK's own and those of contexts, stays as it is.
func coded(err error) error {
	var refused *cloudapi.Error
	var network *net.OpError
	switch {
	case err == nil, driversdk.CodeOf(err) != driversdk.Unknown:
		return err
	case errors.As(err, &refused):
		return driversdk.WithRetryAfter(driversdk.NewError(codeOf(refused), err), refused.RetryAfter)
	case errors.As(err, &network) && network.Op == "dial":
		return driversdk.NewError(driversdk.Unavailable, err) // no connection, so no effect
	default:
		return driversdk.NewError(driversdk.Unknown, err) // the answer was lost
	}
}

// mutation gives an error of a call that changes something a code, and says when
// nobody can tell whether it had an effect.
func mutation(err error) error {
	if lost(err) {
		return driversdk.OutcomeUnknown(coded(err))
	}

	return coded(err)
}

// lost tells whether a request was sent, or may have been, and its answer does not
// tell what became of it: a server that fails may do so when the work is done.
func lost(err error) bool {
	if err == nil {
		return false
	}
	if answer, answered := errors.AsType[*cloudapi.Error](err); answered {
		return answer.Status >= http.StatusInternalServerError && answer.Code != cloudapi.CodeUnavailable
	}
	network, ok := errors.AsType[*net.OpError](err)

	return !ok || network.Op != "dial" // without a connection nothing was sent
}

func codeOf(e *cloudapi.Error) driversdk.Code {
	if code, ok := codes[e.Code]; ok {
		return code
	}
	switch {
	case e.Status == http.StatusUnauthorized:
		return driversdk.Unauthenticated
	case e.Status == http.StatusForbidden:
		return driversdk.PermissionDenied
	case e.Status == http.StatusTooManyRequests, e.Status == http.StatusBadGateway,
		e.Status == http.StatusServiceUnavailable, e.Status == http.StatusGatewayTimeout:
		return driversdk.Unavailable
	case e.Status >= http.StatusInternalServerError:
		return driversdk.Internal
	default:
		// A 404 among them: whoever does not speak as the cloud does must not
		// make an instance look gone.
		return driversdk.FailedPrecondition
	}
}
