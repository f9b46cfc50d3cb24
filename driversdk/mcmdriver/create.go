package mcmdriver

import (
	"context"

	"github.com/gardener/machine-controller-manager/pkg/util/provider/driver"

	"github.com/machinebus/machinebus/driversdk"
)

// Create asks the driver for the instance's status first, as the machine controller manager
// does. An instance that is there becomes the machine's.
func (d *Driver) Create(ctx context.Context, req *request) (*driversdk.Instance, error) {
	found, err := d.Get(ctx, req)
	switch driversdk.CodeOf(err) {
	case driversdk.NotFound:
	case driversdk.Uninitialized:
		if found == nil {
			return nil, driversdk.Errorf(driversdk.Internal,
				"the driver's GetMachineStatus returned Uninitialized for machine %s/%s, and no instance", req.Machine.Namespace, req.Machine.Name)
		}

		return found, nil // the manager's next step is to initialize it
	default:
		return found, err
	}
	class, err := d.class(req.Class)
	if err != nil {
		return nil, err
	}
	class.ProviderSpec.Raw = withTags(class.ProviderSpec.Raw, map[string]string{
		tagMachineUID: req.Machine.UID, tagOperationID: req.OperationID,
	})
	// The question took its time, in which another attempt may have taken over.
	if err := req.BeginMutation(ctx); err != nil {
		return nil, err
	}
	answer, err := d.driver.CreateMachine(ctx, &driver.CreateMachineRequest{
		Machine: machine(req), MachineClass: class, Secret: secret(req.Class.Secret, req.UserData),
	})
	if answer == nil {
		return nil, cutOff(coded(err))
	}
	keepState(req, answer.LastKnownState)
	if err != nil {
		return nil, cutOff(coded(err))
	}

	return instanceOf(answer.ProviderID, answer.NodeName, answer.Addresses), nil
}
