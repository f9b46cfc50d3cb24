package mcmdriver

import "encoding/json"

// Tags of a new instance. Azure takes no slash in a tag, Google Cloud no dot.
const (
	tagMachineUID  = "machinebus-machine-uid"
	tagOperationID = "machinebus-operation-id"
)

// withTags adds tags to those of a provider spec, so that instances carry the machine's uid.
// A spec whose field tags is missing, or does not map texts to texts, stays as it is: the driver
// would refuse it.
func withTags(spec []byte, tags map[string]string) []byte {
	var fields map[string]json.RawMessage
	err := json.Unmarshal(spec, &fields)
	if err != nil {
		return spec // the driver says what is wrong with it
	}
	var all map[string]string
	if err = json.Unmarshal(fields["tags"], &all); err != nil || all == nil {
		return spec
	}
	for key, value := range tags {
		if _, given := all[key]; !given {
			all[key] = value
		}
	}
	if fields["tags"], err = json.Marshal(all); err != nil {
		return spec
	}
	tagged, err := json.Marshal(fields)
	if err != nil {
		return spec
	}

	return tagged
}
