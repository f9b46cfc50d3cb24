package driversdk

import (
	"context"
	"strings"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A Getter is a [Driver] that finds one instance faster than by listing all. It
// changes nothing [STATUS-1]. An absent instance is [NotFound] [STATUS-2]; more
// than one is [OutOfRange] [STATUS-3]; one that Initialize was not called for is
// [Uninitialized], returned along with the instance [STATUS-4].
type Getter[S any] interface {
	Get(ctx context.Context, req *Request[S]) (*Instance, error)
}

func (h *handler[S]) status(ctx context.Context, c *call) (*driverv1.Result, error) {
	body := c.task.Request.GetStatus()
	req, err := h.request(ctx, c, body.GetMachine(), body.GetClass())
	if err != nil {
		return nil, err
	}
	found, err := h.find(ctx, req)
	instance, err := c.checked("Get", found, err)
	if instance == nil {
		return nil, err
	}
	c.providerID = instance.GetProviderId()

	return &driverv1.Result{Payload: &driverv1.Result_InstanceStatus{
		InstanceStatus: &driverv1.StatusResponse{Instance: instance},
	}}, err
}

// find asks the driver for the machine's instance, or looks it up in the list.
func (h *handler[S]) find(ctx context.Context, req *Request[S]) (*Instance, error) {
	if driver, ok := h.driver.(Getter[S]); ok {
		return spanned(ctx, "Get", func(ctx context.Context) (*Instance, error) { return driver.Get(ctx, req) })
	}
	instances, err := h.instances(ctx, req.Class)
	if err != nil {
		return nil, err
	}

	return pick(req.Machine, instances)
}

// pick returns the instance of a machine: the one with its uid, else the one
// with its provider id, else the one with its name. One that was recorded with
// another machine's uid is never it.
func pick(m Machine, instances []*Instance) (*Instance, error) {
	rules := []func(*Instance) bool{
		func(i *Instance) bool { return m.UID != "" && i.MachineUID == m.UID },
		func(i *Instance) bool { return m.ProviderID != "" && i.ProviderID == m.ProviderID },
		func(i *Instance) bool { return m.Name != "" && i.MachineName == m.Name },
	}
	for _, matches := range rules {
		var found []*Instance
		for _, i := range instances {
			foreign := i == nil || i.MachineUID != "" && m.UID != "" && i.MachineUID != m.UID
			if !foreign && matches(i) {
				found = append(found, i)
			}
		}
		switch len(found) {
		case 0:
		case 1:
			return found[0], nil
		default:
			ids := make([]string, len(found))
			for n, i := range found {
				ids[n] = i.ProviderID
			}

			return nil, Errorf(OutOfRange, "%d instances match machine %s/%s: %s",
				len(found), m.Namespace, m.Name, strings.Join(ids, ", "))
		}
	}

	return nil, Errorf(NotFound, "no instance of machine %s/%s", m.Namespace, m.Name)
}
