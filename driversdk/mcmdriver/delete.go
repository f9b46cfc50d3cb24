package mcmdriver

import (
	"context"

	"github.com/gardener/machine-controller-manager/pkg/util/provider/driver"

	"github.com/machinebus/machinebus/driversdk"
)

// Delete removes the machine's instance. The manager also deletes instances without a
// machine: then the machine has a name, a namespace and a provider id only.
func (d *Driver) Delete(ctx context.Context, req *request) error {
	class, err := d.class(req.Class)
	if err != nil {
		return err
	}
	answer, err := d.driver.DeleteMachine(ctx, &driver.DeleteMachineRequest{
		Machine: machine(req), MachineClass: class, Secret: secret(req.Class.Secret, req.UserData),
	})
	if answer != nil {
		keepState(req, answer.LastKnownState)
	}
	err = coded(err)
	if driversdk.CodeOf(err) == driversdk.NotFound {
		return nil // [DELETE-1]
	}

	return cutOff(err)
}
