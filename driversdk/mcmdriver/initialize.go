package mcmdriver

import (
	"context"

	"github.com/gardener/machine-controller-manager/pkg/util/provider/driver"

	"github.com/machinebus/machinebus/driversdk"
)

// Initialize prepares an instance after its creation. A driver without such a step answers
// Unimplemented, which the manager takes for done.
func (d *Driver) Initialize(ctx context.Context, req *request) (*driversdk.Instance, error) {
	class, err := d.class(req.Class)
	if err != nil {
		return nil, err
	}
	answer, err := d.driver.InitializeMachine(ctx, &driver.InitializeMachineRequest{
		Machine: machine(req), MachineClass: class, Secret: secret(req.Class.Secret, req.UserData),
	})
	if err != nil || answer == nil {
		return nil, cutOff(coded(err))
	}

	return instanceOf(answer.ProviderID, answer.NodeName, answer.Addresses), nil
}
