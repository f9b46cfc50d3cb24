package mcmdriver

import (
	"context"
	"encoding/json"

	"github.com/gardener/machine-controller-manager/pkg/util/provider/driver"
	corev1 "k8s.io/api/core/v1"

	"github.com/machinebus/machinebus/driversdk"
)

// VolumeIDs returns the ids of the volumes that are the provider's.
func (d *Driver) VolumeIDs(ctx context.Context, volumes []driversdk.PersistentVolume) ([]string, error) {
	req := &driver.GetVolumeIDsRequest{}
	for _, v := range volumes {
		spec := &corev1.PersistentVolumeSpec{}
		if err := json.Unmarshal(v.Spec, spec); err != nil {
			return nil, driversdk.Errorf(driversdk.InvalidArgument, "spec of volume %s: %w", v.Name, err)
		}
		req.PVSpecs = append(req.PVSpecs, spec)
	}
	answer, err := d.driver.GetVolumeIDs(ctx, req)
	if err != nil || answer == nil {
		return nil, coded(err)
	}

	return answer.VolumeIDs, nil
}
