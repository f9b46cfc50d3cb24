package drivertest

import (
	"fmt"
	"slices"

	"github.com/nats-io/nuid"

	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// groupClauses are those of replicas that serve node groups. Their checks play the gateway of a cluster-autoscaler.
var groupClauses = []Clause{
	groupClause("GROUP-1", "listens on the provider's tree of node groups in queue group driver", checkGroupQueue),
	groupClause("GROUP-3", "answers them below the provider's reply tree only", checkGroupReplyTree),
	groupClause("GROUP-4", "node groups outlive the replica", checkOutlives),
	groupClause("GROUP-5", "ignores unknown fields of requests about node groups and answers unknown bodies with Unimplemented", checkGroupUnknown),
	groupClause("GROUP-6", "answers a stale resize or delete busy, and does not do it", checkGroupStale),
	groupClause("GROUP-7", "ids of groups are made of letters, digits and ._/-", listedGroups("GROUP-7")),
	groupClause("GROUP-8", "0 <= min_size <= max_size, 0 < max_size", listedGroups("GROUP-8")),
	groupClause("GROUP-9", "instances being deleted do not count for target_size", checkTargetSize),
	groupClause("GROUP-10", "a template has cpu and memory", listedGroups("GROUP-10")),
	groupClause("GROUP-11", "refuses with InvalidArgument what is not the request about node groups that the subject names", checkGroupSubject),
	groupClause("INSTANCES-1", "instances to come are listed", checkInstancesListed),
	groupClause("INSTANCES-2", "an instance that can join is listed by its provider id", checkInstanceIDs),
	groupClause("INSTANCES-3", "delete takes an instance for as long as it is listed", checkDeleteComing),
	groupClause("RESIZE-1", "a resize from another size than the group has is Aborted, in one step", checkResizeStep),
	groupClause("RESIZE-2", "more than max_size is OutOfRange", checkResizeAbove),
	groupClause("RESIZE-3", "a resize takes no instance that has come: FailedPrecondition", checkResizeDown),
	groupClause("RESIZE-4", "a resize that is asked for again is not done again", checkResizeAgain),
	groupClause("REMOVE-1", "removes the named instances and none else, all of them or none", checkRemoveNamed),
	groupClause("REMOVE-2", "one that is gone or going does not lower the target size once more", checkRemoveAgain),
	groupClause("REMOVE-3", "an instance of another group is InvalidArgument", checkRemoveForeign),
	groupClause("REMOVE-4", "a target size below min_size is FailedPrecondition", checkRemoveBelow),
}

func groupClause(id, says string, look func(*groupCheck)) Clause {
	return Clause{ID: id, Says: says, binds: groups, check: func(c *check) { look(&groupCheck{c}) }}
}

func checkGroupQueue(c *groupCheck) {
	c.Shared(c.subject("*"), func() { c.list() }, func() *bench.Exchange { return c.send(groupsRequest()) })
}

func checkGroupReplyTree(c *groupCheck) {
	c.Elsewhere(func() bench.Request { return c.request(newWish(), groupsRequest()) }, func() { c.list() })
}

// checkOutlives has another process of the driver go on where one has ended.
func checkOutlives(c *groupCheck) {
	if c.Process == nil {
		c.Skipf("needs a driver that may be stopped and started %s", bench.ByProcess)
	}
	g := c.theGroup(1)
	id, size, step := g.GetId(), g.GetTargetSize(), g.step(1)
	wish := c.resize(step)
	came := c.come(g, 1)
	c.Restart()
	c.Step("after the driver was started again", func() { c.holds(id, size+1, came...) })
	c.remove(id, size, came...)
	if err := c.Try(func() { c.notAgain(wish, step, size) }); err != nil {
		c.Blamef("RESIZE-4", "asked of another replica than did it: %v", err)
	}
}

// checkGroupUnknown sends fields with numbers that no field of a request has.
func checkGroupUnknown(c *groupCheck) {
	list, teleport := groupsRequest(), &driverv1.NodeGroupsRequest{}
	addUnknown(list, 3000)
	c.Want(ok, "a request with an unknown field", c.send(list).Result())
	addUnknown(teleport, 2000)
	r := c.request(newWish(), teleport)
	r.Subject = c.subject("teleport")
	c.Want(driverv1.Code_CODE_UNIMPLEMENTED, "a request with an unknown body", c.Send(r).Result())
	if answer := c.ask(newWish(), instancesRequest("conformance-"+nuid.Next())).GetNodeGroups(); len(answer.GetInstances().GetInstances()) > 0 {
		c.Failf("a group that is not there has instances")
	}
}

// checkGroupSubject asks for one thing where another one is allowed.
func checkGroupSubject(c *groupCheck) {
	groups, list := c.request(newWish(), groupsRequest()), c.ListRequest()
	groups.Subject, list.Subject = list.Subject, groups.Subject
	other := c.request(newWish(), groupsRequest())
	other.Subject = c.subject("instances")
	for what, r := range map[string]bench.Request{
		"a list of machines' instances, on the subject of groups": list, "groups, on the subject of a list of machines' instances": groups,
		"groups, on the subject of instances": other,
	} {
		c.Want(invalid, what, c.Send(r).Result())
	}
}

func checkGroupStale(c *groupCheck) {
	g := c.theGroup(1)
	late := func(req *driverv1.NodeGroupsRequest, what string, was *group) {
		r := c.request(newWish(), req)
		stale(r.Env)
		c.suite.groups.note(req)
		c.Send(r).Want(what, bench.Busy())
		c.asBefore(what, was)
	}
	late(g.step(1), "a resize that was to be accepted a minute ago", g)
	came := c.grow(g, 1)
	late(deleteRequest(g.GetId(), came...), "a delete that was to be accepted a minute ago", g.with(came))
}

// listedGroups looks at all groups for what is wrong by a clause.
func listedGroups(clause string) func(*groupCheck) {
	return func(c *groupCheck) {
		if len(c.list()) == 0 {
			c.Skipf("the driver has no node group for control plane %s", c.Cluster)
		}
		c.Witnessed(clause)
	}
}

func checkTargetSize(c *groupCheck) {
	g := c.theGroup(1)
	id, size := g.GetId(), g.GetTargetSize()
	came := c.grow(g, 1)
	c.holds(id, size+1)
	c.remove(id, size, came...)
	c.Step("while "+came[0]+" is being deleted", func() { c.holds(id, size) })
	c.Witnessed("GROUP-9")
}

// checkInstancesListed counts what is there and to come.
func checkInstancesListed(c *groupCheck) {
	g := c.theGroup(1)
	id, size := g.GetId(), g.GetTargetSize()
	c.resize(g.step(1))
	if have := len(c.staying(id)); have != int(size)+1 {
		c.Failf("a group of target size %d lists %d instances that are there or to come", size+1, have)
	}
	came := c.come(g, 1)
	c.remove(id, size, came...)
	for _, i := range c.staying(id) {
		if slices.Contains(came, i.GetId()) {
			c.Failf("instance %s was deleted, and is listed as %s", i.GetId(), i.GetState())
		}
	}
}

// checkInstanceIDs sees that the id of an instance that runs stays the same.
func checkInstanceIDs(c *groupCheck) {
	g := c.theGroup(1)
	came := c.grow(g, 1)
	for range c.Repeat {
		c.holds(g.GetId(), g.GetTargetSize()+1, came...)
	}
	c.Witnessed("INSTANCES-2")
}

// checkDeleteComing deletes an instance by the id that it has before it has come.
func checkDeleteComing(c *groupCheck) {
	g := c.theGroup(1)
	id, size := g.GetId(), g.GetTargetSize()
	c.resize(g.step(1))
	c.Within(c.Timeout, "an instance is deleted by the id that it is listed by", func() bool {
		fresh := slices.DeleteFunc(c.staying(id), func(i *driverv1.NodeGroupInstance) bool { return g.ids[i.GetId()] })
		if len(fresh) == 0 {
			return false // some lists lag behind
		}
		victim := fresh[0].GetId()
		answer := c.want(ok, "delete of "+victim+", which is listed", deleteRequest(id, victim))
		if answer.GetDelete().GetTargetSize() == size {
			return true
		}
		for _, i := range c.staying(id) {
			if i.GetId() == victim {
				c.Failf("instance %s (%s) is listed, and a delete of it does nothing", victim, fresh[0].GetState())
			}
		}

		return false // it came meanwhile, and has another id now
	})
}

// checkResizeStep asks for a step from where the group is not, and then several
// times at once for one step.
func checkResizeStep(c *groupCheck) {
	const rivals = 4
	g := c.theGroup(1)
	id, size := g.GetId(), g.GetTargetSize()
	c.refused(resizeRequest(id, size+1, size+1), aborted, fmt.Sprintf("a resize from %d, where the group has %d", size+1, size), g)
	var calls []*bench.Exchange
	for range rivals {
		calls = append(calls, c.send(g.step(1)))
	}
	done := 0
	for _, made := range calls {
		switch answer := made.Settled(); {
		case answer == nil: // no slot
		case answer.GetStatus().GetCode() == ok:
			done++
		default:
			c.Want(aborted, "one of several resizes from the same size", answer)
		}
	}
	if done != 1 {
		c.Failf("of %d resizes from %d to %d that came at once, %d were made, not one", rivals, size, size+1, done)
	}
	c.holds(id, size+1)
}

func checkResizeAbove(c *groupCheck) {
	g := c.theGroup(0)
	above := g.GetMaxSize() + 1
	c.refused(resizeRequest(g.GetId(), g.GetTargetSize(), above), driverv1.Code_CODE_OUT_OF_RANGE,
		fmt.Sprintf("a resize to %d, above the maximum of %d", above, above-1), g)
}

func checkResizeDown(c *groupCheck) {
	g := c.theGroup(1)
	grown := g.with(c.grow(g, 1))
	c.refused(grown.step(-1), precondition, "a resize that would take an instance that has come", grown)
}

// notAgain asks again for a resize that was done, when the group has this size.
func (c *groupCheck) notAgain(wish string, step *driverv1.NodeGroupsRequest, size int32) {
	c.wantOf(wish, ok, "a resize that was done already", step)
	c.Step("a resize that was done already was done again", func() { c.holds(step.GetResize().GetGroup(), size) })
}

// checkResizeAgain asks again for a step at once, and when it could be made again.
func checkResizeAgain(c *groupCheck) {
	g := c.theGroup(1)
	size, step := g.GetTargetSize(), g.step(1)
	wish := c.resize(step)
	c.notAgain(wish, step, size+1)
	c.remove(g.GetId(), size, c.come(g, 1)...)
	c.notAgain(wish, step, size)
	c.Witnessed("RESIZE-4")
}

func checkRemoveNamed(c *groupCheck) {
	g := c.theGroup(2)
	id, size := g.GetId(), g.GetTargetSize()+1
	came := c.grow(g, 2)
	rest := append(g.sorted(), came[1])
	c.remove(id, size, came[0])
	c.Step("only "+came[0]+" was to go", func() { c.holds(id, size, rest...) })
	if c.OtherNodeGroup == "" {
		return
	}
	foreign, _ := c.foreign()
	if answer := c.ask(newWish(), deleteRequest(id, came[1], foreign)); answer.GetStatus().GetCode() == ok {
		c.Failf("a delete of instances of two groups was answered %s", bench.Said(answer))
	}
	c.Step("not all of the named instances could go, so none was to", func() { c.holds(id, size, rest...) })
}

// foreign returns an instance of the other group, and that group.
func (c *groupCheck) foreign() (string, *group) {
	other := c.atRest(c.OtherNodeGroup, 0)
	if len(other.ids) == 0 {
		other = other.with(c.grow(other, 1))
	}

	return other.sorted()[0], other
}

func checkRemoveAgain(c *groupCheck) {
	g := c.theGroup(1)
	id, size, gone := g.GetId(), g.GetTargetSize(), c.grow(g, 1)[0]
	c.remove(id, size, gone, gone) // named twice, it goes once
	for range c.Repeat {
		c.Step("while it is going", func() { c.remove(id, size, gone) })
	}
	c.Within(c.Timeout, "instance "+gone+" is gone", func() bool {
		return !slices.ContainsFunc(c.instances(id), func(i *driverv1.NodeGroupInstance) bool { return i.GetId() == gone })
	})
	c.Step("when it is gone", func() { c.remove(id, size, gone) })
	c.holds(id, size)
}

func checkRemoveForeign(c *groupCheck) {
	if c.OtherNodeGroup == "" {
		c.Skipf("needs a second node group (Config.OtherNodeGroup, --other-node-group)")
	}
	g := c.theGroup(0)
	foreign, other := c.foreign()
	what := "a delete of an instance of group " + other.GetId()
	c.refused(deleteRequest(g.GetId(), foreign), invalid, what, g)
	c.Step(what+" was refused, and yet", func() { c.holds(other.GetId(), other.GetTargetSize(), foreign) })
}

func checkRemoveBelow(c *groupCheck) {
	g := c.theGroup(0)
	many := int(g.GetTargetSize() - g.GetMinSize() + 1)
	if g.GetMinSize() == 0 || many > len(g.ids) {
		c.Skipf("group %s has %d instances of at least %d: none that it could not do without", g.GetId(), len(g.ids), g.GetMinSize())
	}
	c.refused(deleteRequest(g.GetId(), g.sorted()[:many]...), precondition,
		fmt.Sprintf("a delete of %d instances of %d, where %d have to stay", many, len(g.ids), g.GetMinSize()), g)
}
