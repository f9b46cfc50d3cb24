package drivertest

import (
	"slices"
	"strings"

	"github.com/nats-io/nuid"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func (c *groupCheck) subject(verb string) string {
	return c.Below("nodegroup." + c.Provider + "." + verb)
}

// request is what a gateway sends to have a wish fulfilled; id names that.
func (c *groupCheck) request(id string, req *driverv1.NodeGroupsRequest) bench.Request {
	env := c.Envelope(id, &driverv1.Envelope{Body: &driverv1.Envelope_NodeGroups{NodeGroups: req}})
	env.Epoch, env.Owner = 0, "" // it knows neither

	return bench.Request{Subject: c.subject(bus.RequestVerb(env)), Env: env}
}

// newWish names a wish that no other request has.
func newWish() string { return "wish-" + nuid.Next() }

// send publishes a request with an id of its own.
func (c *groupCheck) send(req *driverv1.NodeGroupsRequest) *bench.Exchange {
	c.suite.groups.note(req)

	return c.Send(c.request(newWish(), req))
}

// ask has a wish fulfilled; a replica without a slot is asked again.
func (c *groupCheck) ask(id string, req *driverv1.NodeGroupsRequest) (answer *driverv1.Result) {
	c.suite.groups.note(req)
	c.Eventually("a replica has a slot for a request about node groups", func() bool {
		answer = c.Send(c.request(id, req)).Settled()

		return answer != nil
	})
	c.examine(answer.GetNodeGroups())

	return answer
}

// want asks for something new, and fails unless the answer has this code.
func (c *groupCheck) want(code driverv1.Code, what string, req *driverv1.NodeGroupsRequest) *driverv1.NodeGroupsResponse {
	return c.wantOf(newWish(), code, what, req)
}

// wantOf is want of what has an id already.
func (c *groupCheck) wantOf(id string, code driverv1.Code, what string, req *driverv1.NodeGroupsRequest) *driverv1.NodeGroupsResponse {
	answer := c.ask(id, req)
	c.Want(code, what, answer)

	return answer.GetNodeGroups()
}

func groupsRequest() *driverv1.NodeGroupsRequest {
	return &driverv1.NodeGroupsRequest{Body: &driverv1.NodeGroupsRequest_Groups{Groups: &driverv1.NodeGroupListRequest{}}}
}

func instancesRequest(group string) *driverv1.NodeGroupsRequest {
	return &driverv1.NodeGroupsRequest{Body: &driverv1.NodeGroupsRequest_Instances{
		Instances: &driverv1.NodeGroupInstancesRequest{Group: group},
	}}
}

func resizeRequest(group string, from, to int32) *driverv1.NodeGroupsRequest {
	return &driverv1.NodeGroupsRequest{Body: &driverv1.NodeGroupsRequest_Resize{
		Resize: &driverv1.NodeGroupResizeRequest{Group: group, ExpectedTarget: from, Target: to},
	}}
}

func deleteRequest(group string, ids ...string) *driverv1.NodeGroupsRequest {
	return &driverv1.NodeGroupsRequest{Body: &driverv1.NodeGroupsRequest_Delete{
		Delete: &driverv1.NodeGroupDeleteRequest{Group: group, Instances: ids},
	}}
}

// list asks for all groups.
func (c *groupCheck) list() []*driverv1.NodeGroup {
	return c.want(ok, "groups", groupsRequest()).GetGroups().GetGroups()
}

// named asks for one group.
func (c *groupCheck) named(id string) *driverv1.NodeGroup {
	var ids []string
	for _, g := range c.list() {
		if g.GetId() == id {
			return g
		}
		ids = append(ids, g.GetId())
	}
	c.Failf("there is no group %q for control plane %s; there are: %s", id, c.Cluster, strings.Join(ids, ", "))

	return nil
}

// instances asks for the instances of a group, once it has settled.
func (c *groupCheck) instances(group string) []*driverv1.NodeGroupInstance {
	c.Settle()

	return c.want(ok, "instances of group "+group, instancesRequest(group)).GetInstances().GetInstances()
}

// staying returns the instances of a group that are not being deleted.
func (c *groupCheck) staying(group string) []*driverv1.NodeGroupInstance {
	return slices.DeleteFunc(c.instances(group), func(i *driverv1.NodeGroupInstance) bool {
		return i.GetState() == driverv1.NodeGroupInstanceState_NODE_GROUP_INSTANCE_STATE_DELETING
	})
}

// idLetters are all that ids of groups may be made of.
const idLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._/-"

// examine checks what the contract says of all answers.
func (c *groupCheck) examine(a *driverv1.NodeGroupsResponse) {
	for _, group := range a.GetGroups().GetGroups() {
		c.examineGroup(group)
	}
	seen := map[string]bool{}
	for _, i := range a.GetInstances().GetInstances() {
		c.Leak("STATUSTEXT-1", "the error of instance "+i.GetId(), i.GetError().GetMessage())
		if i.GetId() == "" || seen[i.GetId()] {
			c.Blamef("INSTANCES-2", "an instance is listed with the id %q, which is empty or another's", i.GetId())
		}
		seen[i.GetId()] = true
		scheme, rest, ok := strings.Cut(i.GetId(), "://")
		if i.GetState() == running && (!ok || scheme == "" || rest == "") {
			c.Blamef("INSTANCES-2", "an instance that runs is listed as %q, which is no provider id: want <provider>://<opaque>", i.GetId())
		}
	}
}

func (c *groupCheck) examineGroup(group *driverv1.NodeGroup) {
	id := group.GetId()
	odd := func(r rune) bool { return !strings.ContainsRune(idLetters, r) }
	if id == "" || strings.ContainsFunc(id, odd) {
		c.Blamef("GROUP-7", "there is a group %q", id)
	}
	if group.GetMinSize() < 0 || group.GetMaxSize() <= 0 || group.GetMinSize() > group.GetMaxSize() {
		c.Blamef("GROUP-8", "group %s has sizes %d to %d", id, group.GetMinSize(), group.GetMaxSize())
	}
	if group.GetTargetSize() < 0 {
		c.Blamef("GROUP-9", "group %s has target size %d", id, group.GetTargetSize())
	}
	if t := group.GetTemplate(); t != nil && (t.GetCapacity()["cpu"] == "" || t.GetCapacity()["memory"] == "") {
		c.Blamef("GROUP-10", "the template of group %s lacks cpu or memory", id)
	}
	c.Leak("STATUSTEXT-1", "the description of group "+id, group.GetDescription())
}
