package cloud

import (
	"time"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// Get returns an instance by id. It does not lag as lists do.
func (c *Cloud) Get(id string) (cloudapi.Instance, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i, ok := c.instances[id]
	if !ok {
		return cloudapi.Instance{}, c.refuse(cloudapi.LogEntry{Op: cloudapi.OpGet}, notFound(id))
	}

	return i.Instance, nil
}

// List returns the instances that filter chooses, oldest first, without those
// younger than the list lag.
func (c *Cloud) List(filter cloudapi.Filter) []cloudapi.Instance {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := []cloudapi.Instance{} // not null in JSON
	now, lag := time.Now(), time.Duration(c.knobs.ListLag)
	for _, i := range c.order {
		switch {
		case !chosen(i, filter):
		case now.Sub(i.CreatedAt) < lag:
			c.stats.Hidden++
		default:
			list = append(list, i.Instance)
		}
	}

	return list
}

func chosen(i *instance, filter cloudapi.Filter) bool {
	if filter.Name != "" && filter.Name != i.Name {
		return false
	}
	for k, v := range filter.Tags {
		if has, ok := i.Tags[k]; !ok || has != v {
			return false
		}
	}

	return true
}
