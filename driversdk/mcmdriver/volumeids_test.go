package mcmdriver_test

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/driversdk"
	"github.com/machinebus/machinebus/driversdk/mcmdriver"
	"github.com/machinebus/machinebus/driversdk/mcmdriver/sample/provider"
)

func TestVolumeIDs(t *testing.T) {
	t.Parallel()
	d := mcmdriver.New(provider.New(), provider.Name)
	got, err := d.VolumeIDs(t.Context(), []driversdk.PersistentVolume{
		{Name: "ours", Spec: json.RawMessage(`{"csi":{"driver":"virtual.machinebus.io","volumeHandle":"vol-1"},"capacity":{"storage":"1Gi"}}`)},
		{Name: "another's", Spec: json.RawMessage(`{"csi":{"driver":"ebs.csi.aws.com","volumeHandle":"vol-2"}}`)},
	})
	if diff := cmp.Diff([]string{"vol-1"}, got); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	_, err = d.VolumeIDs(t.Context(), []driversdk.PersistentVolume{{Name: "broken", Spec: json.RawMessage(`{"csi":1}`)}})
	if driversdk.CodeOf(err) != driversdk.InvalidArgument {
		t.Errorf("a spec that is none: %v, want InvalidArgument", err)
	}
}
