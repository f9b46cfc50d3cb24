package mcmdriver

import (
	"errors"

	"github.com/gardener/machine-controller-manager/pkg/util/provider/machinecodes/codes"
	"github.com/gardener/machine-controller-manager/pkg/util/provider/machinecodes/status"

	"github.com/machinebus/machinebus/driversdk"
)

// coded gives a driver's error its code. That project reads codes from texts, and fails on
// a text with brackets of its own: the error's value comes first here.
func coded(err error) error {
	if err == nil {
		return nil
	}
	said, ok := errors.AsType[*status.Status](err)
	if !ok {
		if said, ok = status.FromError(err); !ok {
			return err // without a code, unless it is the context's
		}
	}
	if said.Code() > codes.Uninitialized {
		return driversdk.Errorf(driversdk.Unknown, "%s", said.Message())
	}

	// Both sides number them like gRPC, and Uninitialized 17.
	return driversdk.Errorf(driversdk.Code(said.Code()), "%s", said.Message())
}

// cutOff marks the error of a call that ended before the cloud had answered. With all other
// codes the driver knows that the call failed, or the next attempt asks for the status.
func cutOff(err error) error {
	switch driversdk.CodeOf(err) {
	case driversdk.Canceled, driversdk.DeadlineExceeded:
		return driversdk.OutcomeUnknown(err)
	default:
		return err
	}
}
