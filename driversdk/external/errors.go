package external

import (
	"regexp"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/driversdk"
)

// Texts that name a code: of the later machine controller manager, and of a gRPC status.
var codedTexts = []*regexp.Regexp{
	regexp.MustCompile(`(?s)^(.*)machine codes error: code = \[(\w+)\] message = \[(.*)\]`),
	regexp.MustCompile(`(?s)^(.*)rpc error: code = (\w+) desc = (.*)$`),
}

var codes = codesByName()

func codesByName() map[string]driversdk.Code {
	byName := map[string]driversdk.Code{}
	for code := driversdk.Canceled; code <= driversdk.Uninitialized; code++ {
		byName[bus.CodeName(code)] = code
	}

	return byName
}

// coded gives an error without a code the one that its text names. What only frames the message
// is left out: mcm frames it again.
func coded(err error) error {
	if err == nil || driversdk.CodeOf(err) != driversdk.Unknown {
		return err
	}
	for _, form := range codedTexts {
		if match := form.FindStringSubmatch(err.Error()); match != nil {
			if code, ok := codes[match[2]]; ok {
				return driversdk.NewError(code, reworded{match[1] + match[3], err})
			}
		}
	}

	return err
}

// cutOff marks the error of a call that ended before the cloud had answered: what was asked for may
// still happen.
func cutOff(err error) error {
	switch driversdk.CodeOf(err) {
	case driversdk.Canceled, driversdk.DeadlineExceeded:
		return driversdk.OutcomeUnknown(err)
	default:
		return err
	}
}

// A reworded error has another text than its cause.
type reworded struct {
	text  string
	cause error
}

func (e reworded) Error() string { return e.text }

func (e reworded) Unwrap() error { return e.cause }
