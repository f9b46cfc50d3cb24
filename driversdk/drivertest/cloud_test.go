package drivertest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"google.golang.org/protobuf/proto"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A cloud is what a replica has for one. It outlives the replica's process.
type cloud struct {
	fault fault
	down  atomic.Bool // it cannot be reached

	mu        sync.Mutex
	instances map[string]*instance // by provider id
	tokens    map[string][]string  // of creations, by the instance's name
	made      int
	holds     map[string]*holdup // by the instance's name
	late      []func()           // make instances, when a list was asked for after a delete
	deleted   bool

	pools *pools
}

// An instance is one of the cloud, with what the cloud alone knows of it.
type instance struct {
	*driverv1.Instance

	cluster     string
	initialized bool
}

// A holdup keeps creations waiting.
type holdup struct {
	gate    chan struct{}
	arrived chan struct{} // closed once somebody waits
	once    sync.Once
	inside  sync.WaitGroup
}

func newCloud(f fault) *cloud {
	return &cloud{
		fault: f, instances: map[string]*instance{}, tokens: map[string][]string{}, holds: map[string]*holdup{},
		pools: newPools(f),
	}
}

// hooks lend the suite its look.
func (c *cloud) hooks() Cloud {
	return Cloud{
		Hold: c.hold, Held: c.held,
		Duplicate: func(_ context.Context, m *driverv1.Machine) error {
			c.make("default", m, "")

			return nil
		},
		Tokens: func(_ context.Context, machine string) ([]string, error) {
			c.mu.Lock()
			defer c.mu.Unlock()

			return slices.Clone(c.tokens[machine]), nil
		},
	}
}

func (c *cloud) hold(_ context.Context, name string) (release func(), err error) {
	h := &holdup{gate: make(chan struct{}), arrived: make(chan struct{})}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.holds[name] = h

	return sync.OnceFunc(func() {
		c.mu.Lock()
		delete(c.holds, name)
		c.mu.Unlock()
		close(h.gate)
		h.inside.Wait() // what is removed afterwards is there to be removed
	}), nil
}

func (c *cloud) held(ctx context.Context, name string) error {
	c.mu.Lock()
	h := c.holds[name]
	c.mu.Unlock()
	select {
	case <-h.arrived:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// arrive is the moment at which a creation has reached the cloud; it waits there
// for as long as it is held. Leave ends it.
func (c *cloud) arrive(name string) (leave func()) {
	c.mu.Lock()
	h := c.holds[name]
	if h == nil {
		c.mu.Unlock()

		return func() {}
	}
	h.inside.Add(1)
	c.mu.Unlock()
	h.once.Do(func() { close(h.arrived) })
	<-h.gate

	return h.inside.Done
}

// make makes an instance without an owner; two of one name are the caller's business.
func (c *cloud) make(cluster string, m *driverv1.Machine, token string) *driverv1.Instance {
	return c.makeFor("", cluster, m, token)
}

func (c *cloud) makeFor(owner, cluster string, m *driverv1.Machine, token string) *driverv1.Instance {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.made++
	i := &driverv1.Instance{
		ProviderId: fmt.Sprintf("acme:///%d", c.made), NodeName: m.GetName(), MachineName: m.GetName(), MachineUid: m.GetUid(),
		Owner: owner,
	}
	switch c.fault {
	case "INSTANCE-1":
		i.ProviderId = fmt.Sprint(c.made)
	case "INSTANCE-2":
		i.MachineName = ""
	case "MACHINE-1":
		i.MachineUid = ""
	case "CREATE-3":
		return i
	}
	c.instances[i.GetProviderId()] = &instance{Instance: i, cluster: cluster}
	c.tokens[m.GetName()] = append(c.tokens[m.GetName()], token)

	return proto.CloneOf(i)
}

// makeLate has an instance made once the suite has deleted what it knows, and has seen in a list that it is gone.
func (c *cloud) makeLate(appear func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.late = append(c.late, appear)
}

// hasListed makes what is late.
func (c *cloud) hasListed() {
	c.mu.Lock()
	var due []func()
	if c.deleted {
		due, c.late = c.late, nil
	}
	c.mu.Unlock()
	for _, appear := range due {
		appear()
	}
}

// hasDeleted notes that the suite has asked for a delete.
func (c *cloud) hasDeleted() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deleted = true
}

// find returns the instances of a control plane that are wanted, by provider id.
func (c *cloud) find(cluster string, want func(*instance) bool) []*driverv1.Instance {
	c.mu.Lock()
	defer c.mu.Unlock()
	var found []*driverv1.Instance
	for _, i := range c.instances {
		if i.cluster == cluster && want(i) {
			found = append(found, proto.CloneOf(i.Instance))
		}
	}
	slices.SortFunc(found, func(a, b *driverv1.Instance) int { return strings.Compare(a.GetProviderId(), b.GetProviderId()) })

	return found
}

func (c *cloud) remove(providerID string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.instances, providerID)
}

// initialize marks an instance and reports whether it was marked before.
func (c *cloud) initialize(providerID string) (before bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := c.instances[providerID]
	before, i.initialized = i.initialized, true

	return before
}
