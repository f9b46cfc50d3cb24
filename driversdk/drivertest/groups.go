package drivertest

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	aborted      = driverv1.Code_CODE_ABORTED
	invalid      = driverv1.Code_CODE_INVALID_ARGUMENT
	precondition = driverv1.Code_CODE_FAILED_PRECONDITION

	running = driverv1.NodeGroupInstanceState_NODE_GROUP_INSTANCE_STATE_RUNNING
)

// nodeGroups are the driver's node groups as they were before the suite came.
type nodeGroups struct {
	were    map[string]*group // by id
	touched bool              // sizes may have changed
}

// note remembers that sizes may change, if they may by this request.
func (g *nodeGroups) note(req *driverv1.NodeGroupsRequest) {
	g.touched = g.touched || req.GetResize() != nil || req.GetDelete() != nil
}

// A groupCheck is one look at a driver's node groups.
type groupCheck struct{ *check }

// A group is one at rest: it has as many instances as it is to have, and all have come.
type group struct {
	*driverv1.NodeGroup

	ids map[string]bool
}

// with returns the group with these instances more.
func (g *group) with(ids []string) *group {
	more := &group{NodeGroup: proto.CloneOf(g.NodeGroup), ids: maps.Clone(g.ids)}
	more.TargetSize += int32(len(ids))
	for _, id := range ids {
		more.ids[id] = true
	}

	return more
}

// sorted returns the ids of the group's instances.
func (g *group) sorted() []string { return slices.Sorted(maps.Keys(g.ids)) }

// theGroup returns the group that may be resized, with room for more instances.
func (c *groupCheck) theGroup(room int32) *group {
	if c.NodeGroup == "" {
		c.Skipf("needs a node group that may be resized (Config.NodeGroup, --node-group)")
	}

	return c.atRest(c.NodeGroup, room)
}

// atRest waits until a group is, and notes how it was when the suite came to it.
func (c *groupCheck) atRest(id string, room int32) (now *group) {
	c.Within(c.Timeout, "all instances of group "+id+" have come", func() bool {
		now = &group{NodeGroup: c.named(id), ids: map[string]bool{}}
		staying := c.staying(id)
		for _, i := range staying {
			if i.GetState() == running {
				now.ids[i.GetId()] = true
			}
		}

		return len(now.ids) == int(now.GetTargetSize()) && len(now.ids) == len(staying)
	})
	if c.suite.groups.were[id] == nil {
		c.suite.groups.were[id] = now
	}
	if now.GetTargetSize()+room > now.GetMaxSize() {
		c.Skipf("group %s has %d instances of at most %d; needs room for %d more", id, now.GetTargetSize(), now.GetMaxSize(), room)
	}

	return now
}

// resize asks for a step from one size to another, and fails unless it is made. It returns what the wish is called.
func (c *groupCheck) resize(req *driverv1.NodeGroupsRequest) (wish string) {
	from, to := req.GetResize().GetExpectedTarget(), req.GetResize().GetTarget()
	what := fmt.Sprintf("resize from %d to %d", from, to)
	wish = newWish()
	if have := c.wantOf(wish, ok, what, req).GetResize().GetTargetSize(); have != to {
		c.Failf("%s: answered with target size %d", what, have)
	}

	return wish
}

// step is the resize of a group at rest by this many instances.
func (g *group) step(by int32) *driverv1.NodeGroupsRequest {
	return resizeRequest(g.GetId(), g.GetTargetSize(), g.GetTargetSize()+by)
}

// grow adds instances to a group at rest and returns their ids once they run.
func (c *groupCheck) grow(g *group, by int32) []string {
	c.resize(g.step(by))

	return c.come(g, by)
}

// come waits for the instances that a group at rest did not have.
func (c *groupCheck) come(g *group, n int32) (came []string) {
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
		c.Failf("timed out waiting until %d more instances of group %s run; running: %q, to come: %q", n, g.GetId(), came, waiting)
	}
	slices.Sort(came)

	return came
}

// remove asks for instances to go, and fails unless they are taken with this size left.
func (c *groupCheck) remove(group string, left int32, ids ...string) {
	what := "delete of " + strings.Join(ids, ", ")
	if have := c.want(ok, what, deleteRequest(group, ids...)).GetDelete().GetTargetSize(); have != left {
		c.Failf("%s: answered with target size %d, not %d", what, have, left)
	}
}

// holds fails unless the group has this target size, and these instances stay.
func (c *groupCheck) holds(group string, target int32, ids ...string) {
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
func (c *groupCheck) refused(req *driverv1.NodeGroupsRequest, code driverv1.Code, what string, was *group) {
	c.want(code, what, req)
	c.asBefore(what, was)
}

// asBefore fails unless a group is as it was before what was refused.
func (c *groupCheck) asBefore(what string, was *group) {
	c.Step(what+" was refused, and yet", func() { c.holds(was.GetId(), was.GetTargetSize(), was.sorted()...) })
}

// restoreGroups gives the groups the sizes that they had, by removing what the suite had made.
func (c *check) restoreGroups() {
	g := &c.suite.groups
	if !g.touched {
		return
	}
	g.touched = false
	var errs []error
	for _, id := range slices.Sorted(maps.Keys(g.were)) {
		if err := c.Try(func() { (&groupCheck{c}).restore(g.were[id]) }); err != nil {
			errs = append(errs, fmt.Errorf("node group %s: %w", id, err))
			g.touched = true // the next time
		}
	}
	c.Must(errors.Join(errs...))
}

func (c *groupCheck) restore(was *group) {
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
			delete(c.suite.groups.were, id)
		case surplus < 0: // a faulty driver took more than it had to: others come
			grown = true
			c.ask(newWish(), resizeRequest(id, size, was.GetTargetSize()))
		case surplus > 0 && len(ours) > 0:
			c.ask(newWish(), deleteRequest(id, ours[:min(len(ours), int(surplus))]...))
		}

		return surplus == 0
	})
}
