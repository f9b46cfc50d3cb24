package driversdk

import (
	"context"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func (h *handler[S]) list(ctx context.Context, c *call) (*driverv1.Result, error) {
	class, err := h.class(ctx, c, c.task.Request.GetList().GetClass())
	if err != nil {
		return nil, err
	}
	instances, err := h.instances(ctx, class)
	if err != nil {
		return nil, err
	}
	response := &driverv1.ListResponse{}
	for _, i := range instances {
		switch {
		case i == nil || i.ProviderID == "":
			return nil, Errorf(Internal, "driver listed an instance without a provider id [INSTANCE-1]")
		case i.MachineName == "":
			return nil, Errorf(Internal, "driver listed instance %s without a machine name [INSTANCE-2]", i.ProviderID)
		}
		response.Instances = append(response.Instances, i.proto())
	}

	return &driverv1.Result{Payload: &driverv1.Result_List{List: response}}, nil
}

// class makes what a driver's method gets of an operation on a class.
func (h *handler[S]) class(ctx context.Context, c *call, ref *driverv1.ClassReference) (*Class[S], error) {
	class, err := h.classes.resolve(ctx, c.task.Cluster, ref)
	if err != nil {
		return nil, err
	}
	c.scrub = newScrubber(class.Secret)

	return class, nil
}

// instances asks the driver's List.
func (h *handler[S]) instances(ctx context.Context, class *Class[S]) ([]*Instance, error) {
	return spanned(ctx, "List", func(ctx context.Context) ([]*Instance, error) { return h.driver.List(ctx, class) })
}
