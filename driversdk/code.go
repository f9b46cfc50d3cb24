package driversdk

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A Code says how an operation ended, and so what the manager does next.
type Code = driverv1.Code

// The codes. Where a code has no remark the manager tries again after some
// minutes.
const (
	// OK is success; no error has it.
	OK = driverv1.Code_CODE_OK
	// Canceled: the operation was cancelled.
	Canceled = driverv1.Code_CODE_CANCELED
	// Unknown is the code of an error without a code. Retried soon.
	Unknown = driverv1.Code_CODE_UNKNOWN
	// InvalidArgument: the class or the machine is wrong and must be changed.
	InvalidArgument = driverv1.Code_CODE_INVALID_ARGUMENT
	// DeadlineExceeded: the deadline has passed and the outcome is unknown. Retried
	// soon, after a look at what exists.
	DeadlineExceeded = driverv1.Code_CODE_DEADLINE_EXCEEDED
	// NotFound: there is no such instance.
	NotFound = driverv1.Code_CODE_NOT_FOUND
	// AlreadyExists: another instance or owner has the machine's name.
	AlreadyExists = driverv1.Code_CODE_ALREADY_EXISTS
	// PermissionDenied: the credentials are valid but lack a permission.
	PermissionDenied = driverv1.Code_CODE_PERMISSION_DENIED
	// ResourceExhausted: no quota or no capacity. An autoscaler turns to other
	// node groups.
	ResourceExhausted = driverv1.Code_CODE_RESOURCE_EXHAUSTED
	// FailedPrecondition: something must be put right by hand first.
	FailedPrecondition = driverv1.Code_CODE_FAILED_PRECONDITION
	// Aborted: a concurrent change interfered. Retried soon.
	Aborted = driverv1.Code_CODE_ABORTED
	// OutOfRange: more than one instance matches the machine.
	OutOfRange = driverv1.Code_CODE_OUT_OF_RANGE
	// Unimplemented: the driver cannot do this.
	Unimplemented = driverv1.Code_CODE_UNIMPLEMENTED
	// Internal: a fault of the driver or the cloud.
	Internal = driverv1.Code_CODE_INTERNAL
	// Unavailable: the cloud does not answer or is overloaded. Retried soon.
	Unavailable = driverv1.Code_CODE_UNAVAILABLE
	// DataLoss: something is lost for good.
	DataLoss = driverv1.Code_CODE_DATA_LOSS
	// Unauthenticated: the cloud refused the credentials.
	Unauthenticated = driverv1.Code_CODE_UNAUTHENTICATED
	// Uninitialized, from Get: the instance exists and Initialize is still to be
	// called.
	Uninitialized = driverv1.Code_CODE_UNINITIALIZED
)

// CreateIdentity says what keeps a driver's Create from making a second
// instance when the first answer was lost.
type CreateIdentity = driverv1.CreateIdentity

// The ways in which a Create is identified; none given means [IdentityNone].
const (
	// IdentityToken: the driver passes [Request.OperationID] to the cloud as an
	// idempotency token [IDENTITY-1].
	IdentityToken = driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN
	// IdentityUniqueName: the cloud refuses a second instance of a name, and the
	// driver names the instance by the machine alone [IDENTITY-2].
	IdentityUniqueName = driverv1.CreateIdentity_CREATE_IDENTITY_UNIQUE_NAME
	// IdentityNone: nothing does. A lost Create is asked again late, with
	// [Request.Recover].
	IdentityNone = driverv1.CreateIdentity_CREATE_IDENTITY_NONE
)

// NewError returns err with a code; its text stays. A nil err stays nil. An
// error is never a success: [OK] becomes [Internal].
func NewError(code Code, err error) error {
	if code == OK {
		code = Internal
	}

	return bus.NewError(code, err)
}

// Errorf is [NewError] with a formatted text; it wraps what %w names. The text
// is shown to people and must not hold a secret [STATUSTEXT-1].
func Errorf(code Code, format string, args ...any) error {
	return NewError(code, fmt.Errorf(format, args...))
}

// CodeOf returns the code of any error: [OK] for nil, the code it was made with,
// [Canceled] or [DeadlineExceeded] for a context's errors, [Unknown] for others.
func CodeOf(err error) Code { return bus.CodeOf(err) }

// WithRetryAfter adds the cloud's own word on when to come again. A nil err stays
// nil; a wait of zero or less adds nothing.
func WithRetryAfter(err error, wait time.Duration) error {
	if err == nil || wait <= 0 {
		return err
	}
	coded := NewError(CodeOf(err), err)
	if e, ok := errors.AsType[*bus.Error](coded); ok {
		e.RetryAfter = wait
	}

	return coded
}

// OutcomeUnknown says of an error of Create, Initialize or Delete that the cloud's
// answer was lost: what was asked for may have happened or may still happen. A
// driver returns it when a call that changes something was sent and not answered
// (a broken connection, a time-out of the client), or answered with a server error
// such as HTTP 500, which may come when the work is done. It must not be used when the
// cloud refused the request.
//
// The manager then does not take the operation as failed: it tries it again under
// the same [Request.OperationID], with [Request.Recover]. The error keeps its code
// and its text; a nil err stays nil. The SDK says it by itself when, after
// [Request.BeginMutation], the context ends, the method panics, or it returns what the
// contract does not allow, such as an instance without a provider id.
func OutcomeUnknown(err error) error {
	if err == nil {
		return nil
	}

	return &outcomeUnknownError{err: err}
}

type outcomeUnknownError struct{ err error }

func (e *outcomeUnknownError) Error() string { return e.err.Error() }

func (e *outcomeUnknownError) Unwrap() error { return e.err }

// codedBy gives an error that has no code the context's, if that has ended: a
// client library may not say that it gave up because of its context.
func codedBy(ctx context.Context, err error) error {
	if err != nil && CodeOf(err) == Unknown && ctx.Err() != nil {
		return NewError(CodeOf(ctx.Err()), err)
	}

	return err
}
