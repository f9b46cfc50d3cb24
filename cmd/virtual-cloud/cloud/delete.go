package cloud

import (
	"slices"
	"time"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// Delete removes an instance. It takes the delete latency, during which the
// instance is switched off and still listed. A delete of an instance that is
// being deleted waits for that.
func (c *Cloud) Delete(id string) (cloudapi.Instance, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	entry := cloudapi.LogEntry{Op: cloudapi.OpDelete, ID: id}
	i, ok := c.instances[id]
	if !ok {
		return cloudapi.Instance{}, c.refuse(entry, notFound(id))
	}
	entry.Name, entry.MachineUID = i.Name, i.Tags[cloudapi.TagMachineUID]
	if err := c.record(with(entry, cloudapi.EventBegin)); err != nil {
		return cloudapi.Instance{}, err
	}
	if i.State == cloudapi.StateDeleting {
		if err := c.await(i.gone); err != nil {
			return cloudapi.Instance{}, c.refuse(entry, err)
		}
		c.note(with(entry, cloudapi.EventExisting))

		return *snapshot(i), nil
	}
	before := i.State
	i.State = cloudapi.StateDeleting
	i.boot.Stop()
	c.listener.Stopped(id)

	latency := time.Duration(c.knobs.DeleteLatency)
	c.mu.Unlock()
	err := c.pause(latency)
	c.mu.Lock()
	if err == nil {
		err = c.record(with(entry, cloudapi.EventDeleted))
	}
	if err != nil {
		_ = before

		return cloudapi.Instance{}, c.refuse(entry, err)
	}
	i.State = cloudapi.StateGone
	delete(c.instances, id)
	c.order = slices.DeleteFunc(c.order, func(o *instance) bool { return o == i })
	c.retireToken(i)
	c.stats.Deleted++
	c.stats.Live--
	close(i.gone)

	return *snapshot(i), nil
}
