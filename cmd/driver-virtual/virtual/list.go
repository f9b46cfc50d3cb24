package virtual

import (
	"context"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/driversdk"
)

// List returns the instances of the class, without those of other control planes
// [LIST-3].
func (d *Driver) List(ctx context.Context, class *driversdk.Class[Spec]) ([]*driversdk.Instance, error) {
	cloud, err := cloudOf(class)
	if err != nil {
		return nil, err
	}
	list, err := cloud.List(ctx, cloudapi.Filter{Tags: map[string]string{
		tagCluster: class.Cluster, tagClass: classTag(class),
	}})
	if err != nil {
		return nil, coded(err)
	}
	instances := make([]*driversdk.Instance, len(list))
	for n := range list {
		instances[n] = instanceOf(&list[n])
	}

	return instances, nil
}
