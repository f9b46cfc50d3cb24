package mcmdriver

import (
	"context"
	"slices"
	"strings"

	"github.com/gardener/machine-controller-manager/pkg/util/provider/driver"

	"github.com/machinebus/machinebus/driversdk"
)

// Get returns the machine's instance. It looks it up in the driver's list if the driver
// does not implement GetMachineStatus.
func (d *Driver) Get(ctx context.Context, req *request) (*driversdk.Instance, error) {
	class, err := d.class(req.Class)
	if err != nil {
		return nil, err
	}
	answer, err := d.driver.GetMachineStatus(ctx, &driver.GetMachineStatusRequest{
		Machine: machine(req), MachineClass: class, Secret: secret(req.Class.Secret, req.UserData),
	})
	err = coded(err)
	switch driversdk.CodeOf(err) {
	case driversdk.OK, driversdk.Uninitialized:
		if answer == nil {
			return nil, err
		}

		return instanceOf(answer.ProviderID, answer.NodeName, answer.Addresses), err
	case driversdk.Unimplemented:
		return d.getListed(ctx, req)
	default:
		return nil, err
	}
}

// getListed finds the machine's instance in the list, by its provider id or else by its name.
func (d *Driver) getListed(ctx context.Context, req *request) (*driversdk.Instance, error) {
	all, err := d.List(ctx, req.Class)
	if err != nil {
		return nil, err
	}
	m := req.Machine
	found := slices.DeleteFunc(slices.Clone(all), func(i *driversdk.Instance) bool { return i.MachineName != m.Name })
	if n := slices.IndexFunc(all, func(i *driversdk.Instance) bool { return i.ProviderID == m.ProviderID }); n >= 0 {
		found = all[n : n+1]
	}
	switch len(found) {
	case 0:
		return nil, driversdk.Errorf(driversdk.NotFound, "no instance of machine %s/%s", m.Namespace, m.Name)
	case 1:
		return found[0], nil
	default:
		ids := make([]string, len(found))
		for n, i := range found {
			ids[n] = i.ProviderID
		}

		return nil, driversdk.Errorf(driversdk.OutOfRange, "%d instances have the name of machine %s/%s: %s",
			len(found), m.Namespace, m.Name, strings.Join(ids, ", "))
	}
}
