package cloud

import (
	"slices"
	"time"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// Delete deletes an instance. It takes the delete latency, during which the instance is
// switched off and still listed. If another delete of it runs, Delete waits for that.
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
	for i.deleting != nil {
		if err := c.await(i.deleting); err != nil {
			return cloudapi.Instance{}, c.refuse(entry, err)
		}
	}
	if i.State == cloudapi.StateGone {
		c.note(with(entry, cloudapi.EventExisting))

		return i.Instance, nil
	}
	if err := c.remove(i, entry); err != nil {
		return cloudapi.Instance{}, c.refuse(entry, err)
	}

	return i.Instance, nil
}

// remove switches an instance off and, after the latency, ends it. c.mu is held,
// but not while it waits.
func (c *Cloud) remove(i *instance, entry cloudapi.LogEntry) *cloudapi.Error {
	i.deleting = make(chan struct{})
	defer func() {
		close(i.deleting)
		i.deleting = nil
	}()
	if i.State != cloudapi.StateDeleting { // it is Deleting if an earlier delete could not be logged
		i.State = cloudapi.StateDeleting
		i.boot.Stop()
		c.listener.Stopped(i.ID)
	}
	latency := time.Duration(c.knobs.DeleteLatency)
	c.mu.Unlock()
	err := c.pause(latency)
	c.mu.Lock()
	if err == nil {
		err = c.record(with(entry, cloudapi.EventDeleted))
	}
	if err != nil {
		return err
	}
	i.State = cloudapi.StateGone
	delete(c.instances, i.ID)
	c.order = slices.DeleteFunc(c.order, func(o *instance) bool { return o == i })
	c.retireToken(i)
	c.stats.Deleted++
	c.stats.Live--

	return nil
}
