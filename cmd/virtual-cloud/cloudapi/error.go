package cloudapi

import (
	"errors"
	"fmt"
	"time"
)

// The codes of [Error]. Fault rules may set others.
const (
	CodeInvalidArgument = "InvalidArgument"          // 400
	CodeUnauthorized    = "Unauthorized"             // 401
	CodeQuotaExceeded   = "QuotaExceeded"            // 403
	CodeNotFound        = "NotFound"                 // 404
	CodeAlreadyExists   = "AlreadyExists"            // 409; see InstanceID
	CodeTokenMismatch   = "IdempotencyTokenMismatch" // 409; the token was used for another instance
	CodeTokenUsed       = "IdempotencyTokenUsed"     // 409; the token's instance has been deleted
	CodeConflict        = "Conflict"                 // 409; the instance's state forbids it
	CodeRequestTooLarge = "RequestTooLarge"          // 413
	CodeRateLimited     = "RateLimited"              // 429
	CodeInternal        = "Internal"                 // 500
	CodeUnavailable     = "Unavailable"              // 503; the cloud is shutting down and did nothing
)

// An Error is a refusal by the cloud. If a call returns any other error, it got no answer
// and its effect is unknown.
type Error struct {
	Status  int // of HTTP
	Code    string
	Message string
	// RetryAfter is how long to wait before the next try; 0 if unknown.
	RetryAfter time.Duration
	// InstanceID is the instance that conflicts with the call, if there is one.
	InstanceID string
}

func (e *Error) Error() string {
	return fmt.Sprintf("virtual cloud: %s (%s, HTTP %d)", e.Message, e.Code, e.Status)
}

// CodeOf returns the code of the [Error] in err's chain, or "" without one.
func CodeOf(err error) string {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}

	return ""
}

// ErrorBody is the HTTP body of an [Error].
type ErrorBody struct {
	Error struct {
		Code       string   `json:"code"`
		Message    string   `json:"message"`
		RetryAfter Duration `json:"retryAfter,omitzero"`
		InstanceID string   `json:"instanceID,omitempty"`
	} `json:"error"`
}
