package cloud

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// rememberedResizes is how many request ids a pool remembers.
const rememberedResizes = 256

// A pool maintains a number of instances; guarded by Cloud.mu.
type pool struct {
	cloudapi.Pool // its Size is outdated: see size

	slots   []*slot  // oldest first
	resizes []string // request ids that were done, oldest first
}

// A slot is the place of one instance in a pool.
type slot struct {
	name     string
	instance string // its id; empty until it exists
	refusal  *cloudapi.Error
	deleting bool
	left     bool // has been removed from the pool
}

func (p *pool) size() int32 {
	n := int32(0)
	for _, s := range p.slots {
		if !s.deleting {
			n++
		}
	}

	return n
}

func (p *pool) drop(s *slot) {
	s.left = true
	p.slots = slices.DeleteFunc(p.slots, func(o *slot) bool { return o == s })
}

// seen returns a pool with its current size.
func (p *pool) seen() cloudapi.Pool {
	out := p.Pool
	out.Size = p.size()

	return out
}

// PutPool creates or replaces the definition of a pool.
func (c *Cloud) PutPool(in cloudapi.Pool) (cloudapi.Pool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	entry := cloudapi.LogEntry{Op: cloudapi.OpPool, Name: in.Name}
	if in.Name == "" || in.MachineType == "" || in.Region == "" || in.Min < 0 || in.Max <= 0 || in.Min > in.Max {
		return cloudapi.Pool{}, c.refuse(entry, refusal(http.StatusBadRequest, cloudapi.CodeInvalidArgument,
			"a pool needs name, machineType, region, 0 <= min <= max and 0 < max"))
	}
	if err := c.record(with(entry, cloudapi.EventChanged)); err != nil {
		return cloudapi.Pool{}, err
	}
	if p, ok := c.pools[in.Name]; ok {
		p.Pool = in

		return p.seen(), nil
	}
	p := &pool{Pool: in}
	c.pools[in.Name] = p

	return p.seen(), nil
}

// Pools returns all pools, sorted by name.
func (c *Cloud) Pools() []cloudapi.Pool {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := []cloudapi.Pool{} // not null in JSON
	for _, p := range c.pools {
		c.prune(p)
		list = append(list, p.seen())
	}
	slices.SortFunc(list, func(a, b cloudapi.Pool) int { return strings.Compare(a.Name, b.Name) })

	return list
}

// PoolInstances returns the slots of a pool, oldest first.
func (c *Cloud) PoolInstances(name string) ([]cloudapi.PoolInstance, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p, err := c.pool(name)
	if err != nil {
		return nil, err
	}
	list := []cloudapi.PoolInstance{} // not null in JSON
	for _, s := range p.slots {
		one := cloudapi.PoolInstance{Slot: s.name}
		if i, ok := c.instances[s.instance]; ok {
			instance := i.Instance
			one.Instance = &instance
		}
		if s.refusal != nil {
			one.Code, one.Message = s.refusal.Code, s.refusal.Message
		}
		list = append(list, one)
	}

	return list, nil
}

// ResizePool sets a pool's size. Instances are created later.
func (c *Cloud) ResizePool(name string, req cloudapi.ResizeRequest) (cloudapi.Pool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	entry := cloudapi.LogEntry{
		Op: cloudapi.OpPool, Name: name, Token: req.RequestID, Detail: fmt.Sprintf("resize from %d to %d", req.Expected, req.Size),
	}
	p, err := c.pool(name)
	if err != nil {
		return cloudapi.Pool{}, c.refuse(entry, err)
	}
	if req.RequestID != "" && slices.Contains(p.resizes, req.RequestID) {
		c.note(with(entry, cloudapi.EventExisting))

		return p.seen(), nil
	}
	if err := p.mayResize(req); err != nil {
		return cloudapi.Pool{}, c.refuse(entry, err)
	}
	if err := c.record(with(entry, cloudapi.EventChanged)); err != nil {
		return cloudapi.Pool{}, err
	}
	p.resizes = append(p.resizes, req.RequestID)
	p.resizes = p.resizes[max(0, len(p.resizes)-rememberedResizes):]
	for p.size() > req.Size {
		absent := p.absent()
		p.drop(absent[len(absent)-1])
	}
	for p.size() < req.Size {
		s := &slot{name: p.Name + "-" + strings.TrimPrefix(newID(), "i-")}
		p.slots = append(p.slots, s)
		go c.fill(p.Pool, s)
	}

	return p.seen(), nil
}

func (p *pool) mayResize(req cloudapi.ResizeRequest) *cloudapi.Error {
	switch have := p.size(); {
	case have != req.Expected:
		return refusal(http.StatusConflict, cloudapi.CodeSizeChanged, "pool %s has size %d, not %d", p.Name, have, req.Expected)
	case req.Size > p.Max, req.Size < 0:
		return refusal(http.StatusBadRequest, cloudapi.CodeOutOfBounds, "pool %s may have up to %d instances, not %d", p.Name, p.Max, req.Size)
	case int(have-req.Size) > len(p.absent()):
		return refusal(http.StatusConflict, cloudapi.CodeConflict, "pool %s: of %d instances only %d do not exist yet",
			p.Name, have, len(p.absent()))
	default:
		return nil
	}
}

// absent returns the slots without an instance. Those to be removed first are last.
func (p *pool) absent() []*slot {
	var waiting, failed []*slot
	for _, s := range p.slots {
		switch {
		case s.instance != "" || s.deleting:
		case s.refusal != nil:
			failed = append(failed, s)
		default:
			waiting = append(waiting, s)
		}
	}

	return append(waiting, failed...)
}

// fill creates the instance of a slot.
func (c *Cloud) fill(p cloudapi.Pool, s *slot) {
	made, _, err := c.Create(cloudapi.CreateRequest{
		Name: s.name, MachineType: p.MachineType, Region: p.Region, Zone: p.Zone,
		Tags: map[string]string{cloudapi.TagPool: p.Name}, Identity: cloudapi.IdentityUniqueName,
	})
	c.mu.Lock()
	surplus := s.left && err == nil
	if err != nil {
		s.refusal = asError(err)
	} else {
		s.instance = made.ID
	}
	c.mu.Unlock()
	if surplus { // the slot was removed meanwhile
		c.discard(made.ID)
	}
}

// RemoveFromPool deletes instances of a pool in the background.
func (c *Cloud) RemoveFromPool(name string, req cloudapi.RemoveRequest) (cloudapi.Pool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	entry := cloudapi.LogEntry{Op: cloudapi.OpPool, Name: name, Detail: "remove " + strings.Join(req.Instances, " ")}
	p, err := c.pool(name)
	if err != nil {
		return cloudapi.Pool{}, c.refuse(entry, err)
	}
	victims, err := c.victims(p, req.Instances)
	if err != nil {
		return cloudapi.Pool{}, c.refuse(entry, err)
	}
	if left := p.size() - int32(len(victims)); len(victims) > 0 && left < p.Min {
		return cloudapi.Pool{}, c.refuse(entry, refusal(http.StatusConflict, cloudapi.CodeConflict,
			"pool %s would have %d instances, fewer than its minimum of %d", name, left, p.Min))
	}
	if err := c.record(with(entry, cloudapi.EventChanged)); err != nil {
		return cloudapi.Pool{}, err
	}
	for _, s := range victims {
		if s.instance == "" {
			p.drop(s)

			continue
		}
		s.deleting = true
		go func() {
			c.discard(s.instance)
			c.mu.Lock()
			p.drop(s)
			c.mu.Unlock()
		}()
	}

	return p.seen(), nil
}

// victims returns the slots among ids that are not being deleted yet. c.mu is held.
func (c *Cloud) victims(p *pool, ids []string) ([]*slot, *cloudapi.Error) {
	var victims []*slot
	for _, id := range ids {
		for _, other := range c.pools {
			i := slices.IndexFunc(other.slots, func(s *slot) bool { return s.name == id || c.providerID(s) == id })
			switch {
			case i < 0:
			case other != p:
				return nil, refusal(http.StatusBadRequest, cloudapi.CodeInvalidArgument,
					"instance %s belongs to pool %s, not %s", id, other.Name, p.Name)
			case !other.slots[i].deleting && !slices.Contains(victims, other.slots[i]):
				victims = append(victims, other.slots[i])
			}
		}
	}

	return victims, nil
}

func (c *Cloud) providerID(s *slot) string {
	if i, ok := c.instances[s.instance]; ok {
		return i.ProviderID
	}

	return "" // no id is empty
}

// discard deletes an instance that belongs to no pool any more, and logs a failure.
func (c *Cloud) discard(id string) {
	if _, err := c.Delete(id); err != nil && cloudapi.CodeOf(err) != cloudapi.CodeNotFound {
		c.slog.Warn("instance of a pool is left behind", "instance", id, "err", err)
	}
}

// pool returns a pool by name. c.mu is held.
func (c *Cloud) pool(name string) (*pool, *cloudapi.Error) {
	p, ok := c.pools[name]
	if !ok {
		return nil, refusal(http.StatusNotFound, cloudapi.CodeNotFound, "there is no pool %q", name)
	}
	c.prune(p)

	return p, nil
}

// prune removes slots whose instances were deleted directly. c.mu is held.
func (c *Cloud) prune(p *pool) {
	p.slots = slices.DeleteFunc(p.slots, func(s *slot) bool {
		s.left = s.instance != "" && c.instances[s.instance] == nil

		return s.left
	})
}
