package virtual

import (
	"context"

	"github.com/machinebus/machinebus/driversdk"
)

// Initialize initializes an instance after its creation. Repeating it changes nothing
// [INITIALIZE-1].
func (d *Driver) Initialize(ctx context.Context, req *driversdk.Request[Spec]) (*driversdk.Instance, error) {
	cloud, err := cloudOf(req.Class)
	if err != nil {
		return nil, err
	}
	found, err := find(ctx, cloud, req)
	if err != nil {
		return nil, err
	}
	req.Progress("initializing instance " + found.ID)
	done, err := cloud.Initialize(ctx, found.ID)
	if err != nil {
		return nil, mutation(err)
	}

	return instanceOf(done), nil
}
