package dispatch

import (
	"errors"
	"time"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A Code says how an operation ended. The numbers are gRPC's, and 17 for
// Uninitialized.
type Code driverv1.Code

// The codes, with the names of the machine controller manager.
const (
	OK                 = Code(driverv1.Code_CODE_OK)
	Canceled           = Code(driverv1.Code_CODE_CANCELED)
	Unknown            = Code(driverv1.Code_CODE_UNKNOWN)
	InvalidArgument    = Code(driverv1.Code_CODE_INVALID_ARGUMENT)
	DeadlineExceeded   = Code(driverv1.Code_CODE_DEADLINE_EXCEEDED)
	NotFound           = Code(driverv1.Code_CODE_NOT_FOUND)
	AlreadyExists      = Code(driverv1.Code_CODE_ALREADY_EXISTS)
	PermissionDenied   = Code(driverv1.Code_CODE_PERMISSION_DENIED)
	ResourceExhausted  = Code(driverv1.Code_CODE_RESOURCE_EXHAUSTED)
	FailedPrecondition = Code(driverv1.Code_CODE_FAILED_PRECONDITION)
	Aborted            = Code(driverv1.Code_CODE_ABORTED)
	OutOfRange         = Code(driverv1.Code_CODE_OUT_OF_RANGE)
	Unimplemented      = Code(driverv1.Code_CODE_UNIMPLEMENTED)
	Internal           = Code(driverv1.Code_CODE_INTERNAL)
	Unavailable        = Code(driverv1.Code_CODE_UNAVAILABLE)
	DataLoss           = Code(driverv1.Code_CODE_DATA_LOSS)
	Unauthenticated    = Code(driverv1.Code_CODE_UNAUTHENTICATED)
	Uninitialized      = Code(driverv1.Code_CODE_UNINITIALIZED)
)

// String returns the code's name, such as "ResourceExhausted".
func (c Code) String() string { return bus.CodeName(driverv1.Code(c)) }

// CodeOf returns the code of any error; OK for nil.
func CodeOf(err error) Code { return Code(bus.CodeOf(err)) }

// Errorf returns an error with a code, for faults that a controller finds before it asks a
// driver.
func Errorf(code Code, format string, args ...any) error {
	return bus.Errorf(driverv1.Code(code), format, args...)
}

// LaterOf returns the number of the machine's later operation because of which a driver
// refused this one, or 0.
func LaterOf(err error) int64 {
	if e, ok := errors.AsType[*bus.Error](err); ok {
		return e.Later
	}

	return 0
}

// maxRetryAfter bounds a provider's retry time: one in a wrong unit must not delay a
// machine's next try or its deletion for years.
const maxRetryAfter = time.Hour

// RetryAfter returns the time after which the provider asks for a retry, at most an hour, or
// 0 if it does not say.
func RetryAfter(err error) time.Duration {
	if e, ok := errors.AsType[*bus.Error](err); ok {
		return min(e.RetryAfter, maxRetryAfter)
	}

	return 0
}
