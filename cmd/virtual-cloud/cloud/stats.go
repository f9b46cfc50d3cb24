package cloud

import (
	"maps"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// Stats returns the figures.
func (c *Cloud) Stats() cloudapi.Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.stats
	s.Requests, s.Refused, s.Held = maps.Clone(s.Requests), maps.Clone(s.Refused), len(c.held)
	uids, names := make(map[string]bool, len(c.order)), make(map[string]bool, len(c.order))
	for _, i := range c.order {
		switch i.State {
		case cloudapi.StatePending:
			s.Pending++
		case cloudapi.StateRunning:
			s.Running++
		default:
		}
		uid := i.Tags[cloudapi.TagMachineUID]
		byUID, byName := uid != "" && uids[uid], names[i.Name]
		uids[uid], names[i.Name] = true, true
		if byUID {
			s.DuplicatesByUID++
		}
		if byName {
			s.DuplicatesByName++
		}
		if byUID || byName {
			s.Duplicates++
		}
	}

	return s
}

// duplicateOf reports whether an older instance has i's machine uid or name.
func duplicateOf(older []*instance, i *instance) (byUID, byName bool) {
	uid := i.Tags[cloudapi.TagMachineUID]
	for _, o := range older {
		byUID = byUID || uid != "" && o.Tags[cloudapi.TagMachineUID] == uid
		byName = byName || o.Name == i.Name
	}

	return byUID, byName
}
