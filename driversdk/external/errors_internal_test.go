package external

import (
	"errors"
	"fmt"
	"testing"

	"github.com/machinebus/machinebus/driversdk"
)

func TestCoded(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		text   string
		code   driversdk.Code
		want   string
	}{
		"plain":         {"a text of 2018", "out of shelves", driversdk.Unknown, "out of shelves"},
		"machine codes": {"of the later machine controller manager", "machine codes error: code = [ResourceExhausted] message = [no [shelf] left]", driversdk.ResourceExhausted, "no [shelf] left"},
		"wrapped":       {"what wraps it is kept", "create m1: machine codes error: code = [NotFound] message = [gone]", driversdk.NotFound, "create m1: gone"},
		"gRPC":          {"a status", "rpc error: code = PermissionDenied desc = not you", driversdk.PermissionDenied, "not you"},
		"no such code":  {"another code is none", "rpc error: code = Code(99) desc = odd", driversdk.Unknown, "rpc error: code = Code(99) desc = odd"},
		"OK":            {"an error is never a success", "rpc error: code = OK desc = fine", driversdk.Unknown, "rpc error: code = OK desc = fine"},
		"lines":         {"messages may have several", "rpc error: code = Internal desc = a\nb", driversdk.Internal, "a\nb"},
	} {
		err := coded(errors.New(tc.text))
		if driversdk.CodeOf(err) != tc.code || err.Error() != tc.want {
			t.Errorf("%s (%s): %v %q, want %v %q", name, tc.reason, driversdk.CodeOf(err), err, tc.code, tc.want)
		}
	}
	if coded(nil) != nil {
		t.Error("no error became one")
	}
	said := driversdk.Errorf(driversdk.Aborted, "rpc error: code = Internal desc = x")
	if err := coded(said); !errors.Is(err, said) || driversdk.CodeOf(err) != driversdk.Aborted {
		t.Errorf("an error with a code became %v", err)
	}
}

// What was cut off at the cloud may still happen; what the cloud has answered has not.
func TestCutOff(t *testing.T) {
	t.Parallel()
	for text, unknown := range map[string]bool{
		"rpc error: code = DeadlineExceeded desc = context deadline exceeded":     true,
		"machine codes error: code = [Canceled] message = [the client has gone]":  true,
		"machine codes error: code = [ResourceExhausted] message = [no capacity]": false,
		"no such image": false,
	} {
		err := cutOff(coded(errors.New(text)))
		if got := errors.Is(driversdk.OutcomeUnknown(err), err) && fmt.Sprintf("%T", err) == fmt.Sprintf("%T", driversdk.OutcomeUnknown(err)); got != unknown {
			t.Errorf("%q leaves the outcome unknown: %t, want %t", text, got, unknown)
		}
	}
}

// A client's text is never a success, and never lost.
func FuzzCoded(f *testing.F) {
	f.Add("machine codes error: code = [NotFound] message = [gone]")
	f.Add("rpc error: code = Unavailable desc = away")
	f.Add("")
	f.Fuzz(func(t *testing.T, text string) {
		cause := errors.New(text)
		err := coded(cause)
		if driversdk.CodeOf(err) == driversdk.OK || !errors.Is(err, cause) || len(err.Error()) > len(text) {
			t.Errorf("%q became %v", text, err)
		}
	})
}
