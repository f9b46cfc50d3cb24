package nodegroups

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

const (
	ok           = driverv1.Code_CODE_OK
	aborted      = driverv1.Code_CODE_ABORTED
	precondition = driverv1.Code_CODE_FAILED_PRECONDITION

	running = nodegroupv1.InstanceState_INSTANCE_STATE_RUNNING
)

// Groups is the gateway's side of the bus, and the sizes of the driver's node groups before the suite came.
type Groups struct {
	witness *bench.Witness
	replies string            // prefix of reply subjects
	were    map[string]*group // by id

	mu      sync.Mutex
	calls   map[string]*call // by reply subject
	touched bool             // sizes may have changed
}

// A Check is one look at a driver's node groups.
type Check struct {
	*bench.Check

	groups *Groups
}

// Join listens for answers about node groups. It fails if the driver serves none, and has one to check.
func Join(c *bench.Check) *Groups {
	if c.NodeGroup != "" && !c.Serves(driverv1.Operation_OPERATION_NODE_GROUPS) {
		c.Failf("node group %s is to be checked, and the driver does not say that it serves any: "+
			"OPERATION_NODE_GROUPS is not among the capabilities of its sessions", c.NodeGroup)
	}
	g := &Groups{
		witness: &c.Witness, replies: c.Below("reply." + c.Provider + "." + nuid.Next() + "."),
		were: map[string]*group{}, calls: map[string]*call{},
	}
	c.Subscribe(g.replies+"*", "", g.onReply)

	return g
}

// With makes a check one of node groups.
func (g *Groups) With(c *bench.Check) *Check { return &Check{c, g} }

// note remembers a call by its reply subject, and whether it may change sizes.
func (g *Groups) note(c *call, reply string, touches bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.calls[reply] = c
	g.touched = g.touched || touches
}

// A group is one at rest: it has as many instances as it is to have, and all have come.
type group struct {
	*nodegroupv1.Group

	ids map[string]bool
}

// with returns the group with these instances more.
func (g *group) with(ids []string) *group {
	more := &group{Group: proto.CloneOf(g.Group), ids: maps.Clone(g.ids)}
	more.TargetSize += int32(len(ids))
	for _, id := range ids {
		more.ids[id] = true
	}

	return more
}

// sorted returns the ids of the group's instances.
func (g *group) sorted() []string { return slices.Sorted(maps.Keys(g.ids)) }

// theGroup returns the group that may be resized, with room for more instances.
func (c *Check) theGroup(room int32) *group {
	if c.NodeGroup == "" {
		c.Skipf("needs a node group that may be resized (Config.NodeGroup, --node-group)")
	}

	return c.atRest(c.NodeGroup, room)
}

// atRest waits until a group is, and notes how it was when the suite came to it.
func (c *Check) atRest(id string, room int32) (now *group) {
	c.Within(c.Timeout, "all instances of group "+id+" have come", func() bool {
		now = &group{Group: c.named(id), ids: map[string]bool{}}
		staying := c.staying(id)
		for _, i := range staying {
			if i.GetState() == running {
				now.ids[i.GetId()] = true
			}
		}

		return len(now.ids) == int(now.GetTargetSize()) && len(now.ids) == len(staying)
	})
	if c.groups.were[id] == nil {
		c.groups.were[id] = now
	}
	if now.GetTargetSize()+room > now.GetMaxSize() {
		c.Skipf("group %s has %d instances of at most %d; needs room for %d more", id, now.GetTargetSize(), now.GetMaxSize(), room)
	}

	return now
}

// resize asks for a step from one size to another, and fails unless it is made.
func (c *Check) resize(env *nodegroupv1.Envelope) {
	from, to := env.GetResize().GetExpectedTarget(), env.GetResize().GetTarget()
	what := fmt.Sprintf("resize from %d to %d", from, to)
	if have := c.want(ok, what, env).GetResized().GetTargetSize(); have != to {
		c.Failf("%s: answered with target size %d", what, have)
	}
}

// step is the resize of a group at rest by this many instances.
func (g *group) step(by int32) *nodegroupv1.Envelope {
	return resizeRequest(g.GetId(), g.GetTargetSize(), g.GetTargetSize()+by)
}

// grow adds instances to a group at rest and returns their ids once they run.
func (c *Check) grow(g *group, by int32) []string {
	c.resize(g.step(by))

	return c.come(g, by)
}

// come waits for the instances that a group at rest did not have.
func (c *Check) come(g *group, n int32) (came []string) {
	var waiting []string
	if !c.Poll(c.Timeout, func() bool {
		came, waiting = nil, nil
		for _, i := range c.staying(g.GetId()) {
			switch {
			case g.ids[i.GetId()]:
			case i.GetState() == running:
				came = append(came, i.GetId())
			default:
				waiting = append(waiting, i.GetId()+" ("+bench.SaidStatus(i.GetError())+")")
			}
		}

		return len(came) == int(n)
	}) {
		c.Failf("waited in vain until %d more instances of group %s run; they are %q, and to come are %q", n, g.GetId(), came, waiting)
	}
	slices.Sort(came)

	return came
}

// remove asks for instances to go, and fails unless they are taken with this size left.
func (c *Check) remove(group string, left int32, ids ...string) {
	what := "delete of " + strings.Join(ids, ", ")
	if have := c.want(ok, what, deleteRequest(group, ids...)).GetDeleted().GetTargetSize(); have != left {
		c.Failf("%s: answered with target size %d, not %d", what, have, left)
	}
}

// holds fails unless the group has this target size, and these instances stay.
func (c *Check) holds(group string, target int32, ids ...string) {
	there := map[string]bool{}
	for _, i := range c.staying(group) {
		there[i.GetId()] = true
	}
	if have := c.named(group).GetTargetSize(); have != target {
		c.Failf("group %s has target size %d, not %d", group, have, target)
	}
	for _, id := range ids {
		if !there[id] {
			c.Failf("instance %s of group %s goes, or is gone", id, group)
		}
	}
}

// refused fails unless a request is answered with this code, and the group is as
// it was.
func (c *Check) refused(env *nodegroupv1.Envelope, code driverv1.Code, what string, was *group) {
	c.want(code, what, env)
	c.Step(what+" was refused, and yet", func() { c.holds(was.GetId(), was.GetTargetSize(), was.sorted()...) })
}

// Restore gives the groups the sizes that they had, by removing what the
// suite had made.
func (g *Groups) Restore(c *bench.Check) {
	g.mu.Lock()
	touched := g.touched
	g.touched = false
	g.mu.Unlock()
	if !touched {
		return
	}
	var errs []error
	for _, id := range slices.Sorted(maps.Keys(g.were)) {
		if err := c.Try(func() { g.With(c).restore(g.were[id]) }); err != nil {
			errs = append(errs, fmt.Errorf("node group %s: %w", id, err))
			g.mu.Lock()
			g.touched = true // the next time
			g.mu.Unlock()
		}
	}
	c.Must(errors.Join(errs...))
}

func (c *Check) restore(was *group) {
	id, grown := was.GetId(), false
	c.Within(c.Timeout, fmt.Sprintf("it has target size %d again", was.GetTargetSize()), func() bool {
		size := c.named(id).GetTargetSize()
		var ours []string
		for _, i := range c.staying(id) {
			if !was.ids[i.GetId()] {
				ours = append(ours, i.GetId())
			}
		}
		surplus := size - was.GetTargetSize()
		switch {
		case surplus == 0 && grown: // with others than it had
			delete(c.groups.were, id)
		case surplus < 0: // a faulty driver took more than it had to: others come
			grown = true
			c.ask(resizeRequest(id, size, was.GetTargetSize()))
		case surplus > 0 && len(ours) > 0:
			c.ask(deleteRequest(id, ours[:min(len(ours), int(surplus))]...))
		}

		return surplus == 0
	})
}
