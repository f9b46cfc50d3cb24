package cloud

import (
	"net/http"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// Initialize marks an instance as initialized. Repeating it changes nothing.
func (c *Cloud) Initialize(id string) (cloudapi.Instance, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	entry := cloudapi.LogEntry{Op: cloudapi.OpInitialize, ID: id}
	i, ok := c.instances[id]
	if !ok {
		return cloudapi.Instance{}, c.refuse(entry, notFound(id))
	}
	entry.Name, entry.MachineUID = i.Name, i.Tags[cloudapi.TagMachineUID]
	if i.State == cloudapi.StateDeleting {
		return cloudapi.Instance{}, c.refuse(entry,
			refusal(http.StatusConflict, cloudapi.CodeConflict, "instance %s is being deleted", id))
	}
	event := cloudapi.EventInitialized
	if i.Initialized {
		event = cloudapi.EventExisting
	}
	if err := c.record(with(entry, event)); err != nil {
		return cloudapi.Instance{}, err
	}
	i.Initialized = true

	return i.Instance, nil
}
