package virtual

import (
	"context"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/driversdk"
)

// Delete deletes every instance of the machine: the one with its provider id, and those
// tagged with its uid [DELETE-2]. The cloud answers once they are gone [DELETE-3].
func (d *Driver) Delete(ctx context.Context, req *driversdk.Request[Spec]) error {
	if d.IgnoreDeadlines {
		ctx = context.WithoutCancel(ctx)
	}
	cloud, err := cloudOf(req.Class)
	if err != nil {
		return err
	}
	list, err := owned(ctx, cloud, req)
	if err != nil {
		return err
	}
	ids := make([]string, 0, len(list)+1)
	named := req.Machine.ProviderID == ""
	for _, i := range list {
		ids = append(ids, i.ID)
		named = named || i.ProviderID == req.Machine.ProviderID
	}
	if !named { // it may exist nevertheless: lists may lag
		found, err := byProviderID(ctx, cloud, req)
		switch {
		case err == nil:
			ids = append(ids, found.ID)
		case driversdk.CodeOf(err) != driversdk.NotFound:
			return err
		}
	}
	for _, id := range ids {
		req.Progress("removing instance " + id)
		if err := remove(ctx, cloud, req, id); err != nil {
			return err
		}
	}

	return nil
}

// remove removes an instance; an absent one is fine [DELETE-1].
func remove(ctx context.Context, cloud *cloudapi.Client, req *driversdk.Request[Spec], id string) error {
	if err := req.BeginMutation(ctx); err != nil {
		return err
	}
	err := cloud.Delete(ctx, id)
	if cloudapi.CodeOf(err) == cloudapi.CodeNotFound {
		return nil
	}

	return mutation(err)
}
