package virtual

import (
	"errors"
	"net"
	"net/http"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/driversdk"
)

// codes maps the cloud's error codes to those of the contract.
var codes = map[string]driversdk.Code{
	cloudapi.CodeInvalidArgument: driversdk.InvalidArgument,
	cloudapi.CodeUnauthorized:    driversdk.Unauthenticated,
	cloudapi.CodeQuotaExceeded:   driversdk.ResourceExhausted,
	cloudapi.CodeNotFound:        driversdk.NotFound,
	cloudapi.CodeAlreadyExists:   driversdk.AlreadyExists,
	cloudapi.CodeTokenMismatch:   driversdk.AlreadyExists,
	// The next operation has another token.
	cloudapi.CodeTokenUsed: driversdk.Aborted,
	// Another request works on the instance, such as the other one of two deletes.
	cloudapi.CodeConflict:        driversdk.Aborted,
	cloudapi.CodeRequestTooLarge: driversdk.InvalidArgument,
	// Not ResourceExhausted, which would make an autoscaler give up the node group.
	cloudapi.CodeRateLimited: driversdk.Unavailable,
	cloudapi.CodeInternal:    driversdk.Internal,
	cloudapi.CodeUnavailable: driversdk.Unavailable,
}

// coded adds a code to an error of the cloud's client, unless it has one already, such as
// the SDK's own errors and those of contexts.
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

// mutation adds a code to an error of a call that changes something, and marks it if
// the outcome is unknown.
func mutation(err error) error {
	if lost(err) {
		return driversdk.OutcomeUnknown(coded(err))
	}

	return coded(err)
}

// lost reports whether a request may have been sent and its outcome is unknown: a
// server may fail after it has done the work.
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
		// This includes a 404 without the cloud's error code: a server that is not the
		// cloud must not make an instance look deleted.
		return driversdk.FailedPrecondition
	}
}
