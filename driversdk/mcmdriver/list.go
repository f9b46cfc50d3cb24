package mcmdriver

import (
	"context"
	"encoding/json"
	"maps"
	"slices"

	"github.com/gardener/machine-controller-manager/pkg/util/provider/driver"

	"github.com/machinebus/machinebus/driversdk"
)

// List returns the instances of a class. The driver names their machines, and neither uid nor owner.
func (d *Driver) List(ctx context.Context, of *driversdk.Class[json.RawMessage]) ([]*driversdk.Instance, error) {
	class, err := d.class(of)
	if err != nil {
		return nil, err
	}
	answer, err := d.driver.ListMachines(ctx, &driver.ListMachinesRequest{
		MachineClass: class, Secret: secret(of.Secret, of.Secret[userDataKey]),
	})
	if err != nil {
		return nil, coded(err)
	}
	if answer == nil {
		return nil, driversdk.Errorf(driversdk.Internal, "the driver's ListMachines returned neither a list nor an error")
	}
	var instances []*driversdk.Instance
	for _, id := range slices.Sorted(maps.Keys(answer.MachineList)) {
		instances = append(instances, &driversdk.Instance{ProviderID: id, MachineName: answer.MachineList[id]})
	}

	return instances, nil
}
