package bus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/durationpb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// An Origin says where an error comes from, which decides what is known about the
// operation's effect.
type Origin int

const (
	// OriginDriver: a driver answered with this error.
	OriginDriver Origin = iota
	// OriginBus: the request reached no driver. Nothing ran.
	OriginBus
	// OriginTimeout: a driver may have taken the request and gave no answer, or none
	// that can be trusted. The outcome is unknown.
	OriginTimeout
)

func (o Origin) String() string {
	switch o {
	case OriginDriver:
		return "driver"
	case OriginBus:
		return "bus"
	case OriginTimeout:
		return "timeout"
	default:
		return "unknown"
	}
}

// An Error says how an operation failed: a code, an origin, and a text for people.
// There is no Error with code OK.
type Error struct {
	Code   driverv1.Code
	Origin Origin
	// RetryAfter is the delay that the provider asks for; zero if it asks for none.
	RetryAfter time.Duration
	// NoRoom: no replica had a slot for the operation, or there is no replica. It did not
	// begin.
	NoRoom bool
	// Later is the number of a later operation of the machine whose claim kept this one
	// from beginning; 0 for none. Operations with a higher number may begin.
	Later int64

	Err error
}

// NewError returns an error with a code, as a driver makes it. A nil err stays
// nil.
func NewError(code driverv1.Code, err error) error {
	if err == nil {
		return nil
	}

	return &Error{Code: code, Origin: OriginDriver, Err: err}
}

// Errorf is [NewError] with a formatted text; it wraps what %w names.
func Errorf(code driverv1.Code, format string, args ...any) error {
	return &Error{Code: code, Origin: OriginDriver, Err: fmt.Errorf(format, args...)}
}

// NothingRanf returns an Unavailable error that proves that no driver has seen the request.
func NothingRanf(format string, args ...any) *Error {
	return &Error{Code: driverv1.Code_CODE_UNAVAILABLE, Origin: OriginBus, Err: fmt.Errorf(format, args...)}
}

// OutcomeUnknownf returns a DeadlineExceeded error: whether the request was done is not known.
func OutcomeUnknownf(format string, args ...any) *Error {
	return &Error{Code: driverv1.Code_CODE_DEADLINE_EXCEEDED, Origin: OriginTimeout, Err: fmt.Errorf(format, args...)}
}

// Error returns the text without code and origin, which are logged beside it.
func (e *Error) Error() string {
	if e.Err == nil {
		return CodeName(e.Code)
	}

	return e.Err.Error()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// CodeOf returns the code of any error: that of the outermost [Error] in its
// chain, Canceled and DeadlineExceeded for a context's errors, OK for nil, and
// Unknown for all others. A code this version does not know is Internal.
func CodeOf(err error) driverv1.Code {
	var e *Error
	switch {
	case err == nil:
		return driverv1.Code_CODE_OK
	case errors.As(err, &e):
		return failureCode(e.Code)
	case errors.Is(err, context.DeadlineExceeded):
		return driverv1.Code_CODE_DEADLINE_EXCEEDED
	case errors.Is(err, context.Canceled):
		return driverv1.Code_CODE_CANCELED
	default:
		return driverv1.Code_CODE_UNKNOWN
	}
}

// failureCode returns a failure's code. OK and unknown numbers become Internal.
func failureCode(code driverv1.Code) driverv1.Code {
	if _, known := codeNames[code]; !known || code == driverv1.Code_CODE_OK {
		return driverv1.Code_CODE_INTERNAL
	}

	return code
}

// OriginOf returns the origin of err; an error that is not an [Error] is a driver's.
func OriginOf(err error) Origin {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Origin
	}

	return OriginDriver
}

// NothingRan reports whether an error proves that no driver has seen the request.
func NothingRan(err error) bool {
	return err != nil && OriginOf(err) == OriginBus
}

// StatusOf turns an error into its wire form; nil becomes OK.
func StatusOf(err error) *driverv1.Status {
	if err == nil {
		return &driverv1.Status{}
	}
	// Protobuf carries no text that is not UTF-8, and clouds send such.
	s := &driverv1.Status{Code: CodeOf(err), Message: strings.ToValidUTF8(err.Error(), "\uFFFD")}
	if e, ok := errors.AsType[*Error](err); ok && e.RetryAfter > 0 {
		s.RetryAfter = durationpb.New(e.RetryAfter)
	}

	return s
}

// ErrorOf turns a status from the wire into an error; OK becomes nil. A code
// this version does not know is Internal.
func ErrorOf(s *driverv1.Status) error {
	code := s.GetCode()
	if code == driverv1.Code_CODE_OK {
		return nil
	}
	e := &Error{Code: failureCode(code), Origin: OriginDriver, Err: errors.New(Shorten(s.GetMessage()))}
	if s.GetRetryAfter().IsValid() {
		e.RetryAfter = max(0, s.GetRetryAfter().AsDuration())
	}

	return e
}

// MaxText is the longest text taken from a driver, in bytes. It goes into logs, Events
// and objects, and the API server stores none as large as a NATS message.
const MaxText = 8 << 10

// Shorten cuts a text to MaxText bytes.
func Shorten(text string) string {
	if len(text) <= MaxText {
		return text
	}
	cut := MaxText
	for cut > 0 && !utf8.RuneStart(text[cut]) {
		cut--
	}

	return text[:cut] + "…"
}

// codeNames are the names users of the machine controller manager see in
// status.lastOperation, in events and in dashboards.
var codeNames = map[driverv1.Code]string{
	driverv1.Code_CODE_OK:                  "OK",
	driverv1.Code_CODE_CANCELED:            "Canceled",
	driverv1.Code_CODE_UNKNOWN:             "Unknown",
	driverv1.Code_CODE_INVALID_ARGUMENT:    "InvalidArgument",
	driverv1.Code_CODE_DEADLINE_EXCEEDED:   "DeadlineExceeded",
	driverv1.Code_CODE_NOT_FOUND:           "NotFound",
	driverv1.Code_CODE_ALREADY_EXISTS:      "AlreadyExists",
	driverv1.Code_CODE_PERMISSION_DENIED:   "PermissionDenied",
	driverv1.Code_CODE_RESOURCE_EXHAUSTED:  "ResourceExhausted",
	driverv1.Code_CODE_FAILED_PRECONDITION: "FailedPrecondition",
	driverv1.Code_CODE_ABORTED:             "Aborted",
	driverv1.Code_CODE_OUT_OF_RANGE:        "OutOfRange",
	driverv1.Code_CODE_UNIMPLEMENTED:       "Unimplemented",
	driverv1.Code_CODE_INTERNAL:            "Internal",
	driverv1.Code_CODE_UNAVAILABLE:         "Unavailable",
	driverv1.Code_CODE_DATA_LOSS:           "DataLoss",
	driverv1.Code_CODE_UNAUTHENTICATED:     "Unauthenticated",
	driverv1.Code_CODE_UNINITIALIZED:       "Uninitialized",
}

// CodeName returns a code's name as users of the machine controller manager
// know it, such as "ResourceExhausted"; "Unknown" for a number without a name.
func CodeName(code driverv1.Code) string {
	if name, ok := codeNames[code]; ok {
		return name
	}

	return "Unknown"
}

// OneLine turns a text into one line that is short enough for a header.
func OneLine(text string) string {
	const limit = 256
	line := make([]rune, 0, min(len(text), limit))
	for _, r := range text {
		if len(line) == limit {
			break
		}
		if r < ' ' {
			r = ' '
		}
		line = append(line, r)
	}

	return string(line)
}
