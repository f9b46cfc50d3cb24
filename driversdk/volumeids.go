package driversdk

import (
	"context"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A VolumeIDer is a [Driver] that knows which of the provider's volumes stand
// behind persistent volumes, so that a drain can wait until they are free. A
// volume of another provider is left out without an error [VOLUMEIDS-1].
type VolumeIDer interface {
	VolumeIDs(ctx context.Context, volumes []PersistentVolume) ([]string, error)
}

func volumeIDs(ctx context.Context, c *call, driver VolumeIDer) (*driverv1.Result, error) {
	var volumes []PersistentVolume
	for _, v := range c.task.Request.GetVolumeIds().GetVolumes() {
		volumes = append(volumes, PersistentVolume{Name: v.GetName(), Spec: v.GetSpec()})
	}
	ids, err := spanned(ctx, "VolumeIDs", func(ctx context.Context) ([]string, error) { return driver.VolumeIDs(ctx, volumes) })
	if err != nil {
		return nil, err
	}

	return &driverv1.Result{Payload: &driverv1.Result_VolumeIds{
		VolumeIds: &driverv1.VolumeIDsResponse{VolumeIds: ids},
	}}, nil
}
