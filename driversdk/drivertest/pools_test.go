package drivertest

import (
	"fmt"
	"slices"
	"sync"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	creating = driverv1.NodeGroupInstanceState_NODE_GROUP_INSTANCE_STATE_CREATING
	deleting = driverv1.NodeGroupInstanceState_NODE_GROUP_INSTANCE_STATE_DELETING

	poolMax = 4
	// comesIn and goesIn are how often an instance is listed before it has come, and
	// before it is gone.
	comesIn, goesIn = 3, 2
)

// Pools are the node groups of a cloud, pool-a of at least one instance and pool-b.
type pools struct {
	fault fault

	mu  sync.Mutex
	all map[string]*pool
}

type pool struct {
	name     string
	min      int32
	members  []*member
	made     int
	requests []string // to resize, that were done
	lost     int32    // counted twice, by a fault
}

// A member is an instance of a pool.
type member struct {
	name string
	wait int // lists until it has come
	goes bool
	left int // lists until it is gone
}

func newPools(f fault) *pools {
	p := &pools{fault: f, all: map[string]*pool{"pool-a": {name: "pool-a", min: 1}, "pool-b": {name: "pool-b"}}}
	p.all["pool-a"].add(true)

	return p
}

// forget is what a process does that remembers requests by itself.
func (p *pools) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, pool := range p.all {
		pool.requests = nil
	}
}

func (p *pool) add(come bool) {
	p.made++
	m := &member{name: fmt.Sprintf("%s-%d", p.name, p.made), wait: comesIn}
	if come {
		m.wait = 0
	}
	p.members = append(p.members, m)
}

// pass is what time is in this cloud.
func (p *pool) pass() {
	for _, m := range p.members {
		m.wait = max(0, m.wait-1)
		m.left = max(0, m.left-1)
	}
	p.members = slices.DeleteFunc(p.members, func(m *member) bool { return m.goes && m.left == 0 })
}

func (p *pool) size(f fault) int32 {
	n := int32(0)
	for _, m := range p.members {
		if m.state() != deleting || f == "GROUP-9" {
			n++
		}
	}

	return n - p.lost
}

func (m *member) state() driverv1.NodeGroupInstanceState {
	switch {
	case m.goes:
		return deleting
	case m.wait > 0:
		return creating
	default:
		return running
	}
}

func (m *member) remove() { m.goes, m.left = true, goesIn }

// id is a provider id once the instance has come.
func (m *member) id() string {
	if m.wait > 0 {
		return m.name
	}

	return "acme:///" + m.name
}
