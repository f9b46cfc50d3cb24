package virtual

import (
	"context"
	"encoding/json"

	"github.com/machinebus/machinebus/driversdk"
)

// csiDriver is the CSI driver of a virtual cloud's persistent volumes.
const csiDriver = "virtual.machinebus.io"

// VolumeIDs returns the handles of this provider's volumes [VOLUMEIDS-1].
func (d *Driver) VolumeIDs(_ context.Context, volumes []driversdk.PersistentVolume) ([]string, error) {
	var ids []string
	for _, v := range volumes {
		var spec struct {
			CSI *struct {
				Driver       string `json:"driver"`
				VolumeHandle string `json:"volumeHandle"`
			} `json:"csi"`
		}
		if err := json.Unmarshal(v.Spec, &spec); err != nil {
			return nil, driversdk.Errorf(driversdk.InvalidArgument, "spec of volume %s: %w", v.Name, err)
		}
		if spec.CSI != nil && spec.CSI.Driver == csiDriver && spec.CSI.VolumeHandle != "" {
			ids = append(ids, spec.CSI.VolumeHandle)
		}
	}

	return ids, nil
}
