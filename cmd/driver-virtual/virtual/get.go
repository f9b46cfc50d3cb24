package virtual

import (
	"context"
	"strings"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/driversdk"
)

// Get finds the machine's instance by its provider id, or else by the machine's uid.
// It returns an instance that is not initialized yet with an error [STATUS-4].
func (d *Driver) Get(ctx context.Context, req *driversdk.Request[Spec]) (*driversdk.Instance, error) {
	cloud, err := cloudOf(req.Class)
	if err != nil {
		return nil, err
	}
	found, err := find(ctx, cloud, req)
	if err != nil {
		return nil, err
	}
	if !found.Initialized {
		return instanceOf(found), driversdk.Errorf(driversdk.Uninitialized, "instance %s is not initialized", found.ID)
	}

	return instanceOf(found), nil
}

func find(ctx context.Context, cloud *cloudapi.Client, req *driversdk.Request[Spec]) (*cloudapi.Instance, error) {
	if req.Machine.ProviderID != "" {
		return byProviderID(ctx, cloud, req)
	}
	list, err := owned(ctx, cloud, req)
	switch {
	case err != nil:
		return nil, err
	case len(list) == 0:
		return nil, driversdk.Errorf(driversdk.NotFound, "no instance of machine %s/%s", req.Machine.Namespace, req.Machine.Name)
	case len(list) > 1:
		return nil, tooMany(req, list)
	default:
		return &list[0], nil
	}
}

// byProviderID finds the instance with the machine's provider id, whatever its uid tag:
// a machine that was created again has another uid, and the tag may have been removed.
func byProviderID(ctx context.Context, cloud *cloudapi.Client, req *driversdk.Request[Spec]) (*cloudapi.Instance, error) {
	id, err := idOf(req.Machine.ProviderID)
	if err != nil {
		return nil, err
	}
	found, err := cloud.Get(ctx, id)
	switch {
	case err != nil:
		return nil, coded(err)
	case !here(req, found):
		return nil, driversdk.Errorf(driversdk.NotFound, "instance %s belongs to another control plane", id)
	default:
		return found, nil
	}
}

func tooMany(req *driversdk.Request[Spec], list []cloudapi.Instance) error {
	ids := make([]string, len(list))
	for n, i := range list {
		ids[n] = i.ID
	}

	return driversdk.Errorf(driversdk.OutOfRange, "%d instances of machine %s/%s: %s",
		len(list), req.Machine.Namespace, req.Machine.Name, strings.Join(ids, ", "))
}
