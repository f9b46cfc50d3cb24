package nodegroups

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

// A call is one request about node groups and what answers it.
type call struct {
	verb    string
	id      string
	answers chan *nodegroupv1.Envelope

	came atomic.Int32 // answers
}

// answersKept is more than a request has answers.
const answersKept = 8

// verbOf returns what subjects call a request.
func verbOf(env *nodegroupv1.Envelope) string {
	switch env.GetBody().(type) {
	case *nodegroupv1.Envelope_Groups:
		return "groups"
	case *nodegroupv1.Envelope_Instances:
		return "instances"
	case *nodegroupv1.Envelope_Resize:
		return "resize"
	case *nodegroupv1.Envelope_Delete:
		return "delete"
	default:
		return "teleport"
	}
}

func (c *Check) subject(verb string) string { return c.Below("nodegroup." + c.Provider + "." + verb) }

// send publishes a request as a gateway makes it, but for what env says already. Reply is where
// the answer is asked for, unless it is empty.
func (c *Check) send(env *nodegroupv1.Envelope, reply string) *call {
	if env.GetRequestId() == "" {
		env.RequestId = nuid.Next()
	}
	if env.GetAcceptBy() == nil {
		env.AcceptBy = bench.AcceptBy()
	}
	env.Timeout = durationpb.New(c.Timeout)
	made := &call{verb: verbOf(env), id: env.GetRequestId(), answers: make(chan *nodegroupv1.Envelope, answersKept)}
	payload, err := proto.Marshal(env)
	c.Must(err)
	if reply == "" {
		reply = c.groups.replies + nuid.Next()
	}
	c.groups.note(made, reply, env.GetResize() != nil || env.GetDelete() != nil)
	c.Publish(&nats.Msg{Subject: c.subject(made.verb), Reply: reply, Data: payload})

	return made
}

// onReply runs on the subscription's goroutine.
func (g *Groups) onReply(m *nats.Msg) {
	g.mu.Lock()
	c := g.calls[m.Subject]
	g.mu.Unlock()
	if c == nil {
		return
	}
	came := c.came.Add(1)
	var answer *nodegroupv1.Envelope // nil says that no subscriber is there
	if len(m.Data) > 0 || m.Header.Get("Status") != "503" {
		answer = &nodegroupv1.Envelope{}
		if err := proto.Unmarshal(m.Data, answer); err != nil {
			g.witness.Blamef("GROUP-2", "the answer to %s is no envelope: %v", c.verb, err)
		}
		if came > 1 {
			g.witness.Blamef("GROUP-2", "%s was answered %d times", c.verb, came)
		}
		g.examine(c, answer)
	}
	select {
	case c.answers <- answer:
	default: // a driver that answers so often has been seen enough
	}
}

// answered reports whether an answer has come.
func (c *call) answered() bool { return c.came.Load() > 0 }

// answer waits for the answer to a request.
func (c *Check) answer(made *call) *nodegroupv1.Envelope {
	timer := time.NewTimer(c.Late())
	defer timer.Stop()
	select {
	case a := <-made.answers:
		if a == nil {
			c.Failf("node groups, %s: no subscriber is on its subject", made.verb)
		}

		return a
	case <-timer.C:
		c.Failf("node groups, %s: no answer within %s", made.verb, c.Late())
	case <-c.Context().Done():
		c.Must(context.Cause(c.Context()))
	}

	return nil
}

// ask has a request answered. A replica without a slot is asked again.
func (c *Check) ask(env *nodegroupv1.Envelope) (answer *nodegroupv1.Envelope) {
	by := env.GetAcceptBy()
	c.Eventually("a replica has a slot for a request about node groups", func() bool {
		env.AcceptBy = by // counts from now
		answer = c.answer(c.send(env, ""))

		return !answer.GetRefused()
	})

	return answer
}

// want asks, and fails unless the answer has this code.
func (c *Check) want(code driverv1.Code, what string, env *nodegroupv1.Envelope) *nodegroupv1.Envelope {
	answer := c.ask(env)
	c.wantCode(code, what, answer)

	return answer
}

func (c *Check) wantCode(code driverv1.Code, what string, answer *nodegroupv1.Envelope) {
	if answer.GetStatus().GetCode() != code {
		c.Failf("%s: answered %s, not %s", what, bench.SaidStatus(answer.GetStatus()), bus.CodeName(code))
	}
}

func groupsRequest() *nodegroupv1.Envelope {
	return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Groups{Groups: &nodegroupv1.GroupsRequest{}}}
}

func instancesRequest(group string) *nodegroupv1.Envelope {
	return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Instances{Instances: &nodegroupv1.InstancesRequest{Group: group}}}
}

func resizeRequest(group string, from, to int32) *nodegroupv1.Envelope {
	return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Resize{
		Resize: &nodegroupv1.ResizeRequest{Group: group, ExpectedTarget: from, Target: to},
	}}
}

func deleteRequest(group string, ids ...string) *nodegroupv1.Envelope {
	return &nodegroupv1.Envelope{Body: &nodegroupv1.Envelope_Delete{
		Delete: &nodegroupv1.DeleteRequest{Group: group, Instances: ids},
	}}
}

// list asks for all groups.
func (c *Check) list() []*nodegroupv1.Group {
	return c.want(ok, "groups", groupsRequest()).GetGroupsFound().GetGroups()
}

// named asks for one group.
func (c *Check) named(id string) *nodegroupv1.Group {
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
func (c *Check) instances(group string) []*nodegroupv1.Instance {
	c.Settle()

	return c.want(ok, "instances of group "+group, instancesRequest(group)).GetInstancesFound().GetInstances()
}

// staying returns the instances of a group that are not being deleted.
func (c *Check) staying(group string) []*nodegroupv1.Instance {
	return slices.DeleteFunc(c.instances(group), func(i *nodegroupv1.Instance) bool {
		return i.GetState() == nodegroupv1.InstanceState_INSTANCE_STATE_DELETING
	})
}

// idLetters are all that ids of groups may be made of.
const idLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._/-"

// examine checks what the contract says of all answers.
func (g *Groups) examine(c *call, a *nodegroupv1.Envelope) {
	w := g.witness
	if a.GetRequestId() != c.id {
		w.Blamef("GROUP-2", "the answer to %s says request %q, where the request said %q", c.verb, a.GetRequestId(), c.id)
	}
	w.Leak("STATUSTEXT-1", "the status of "+c.verb, a.GetStatus().GetMessage())
	for _, group := range a.GetGroupsFound().GetGroups() {
		g.examineGroup(group)
	}
	seen := map[string]bool{}
	for _, i := range a.GetInstancesFound().GetInstances() {
		w.Leak("STATUSTEXT-1", "the error of instance "+i.GetId(), i.GetError().GetMessage())
		if i.GetId() == "" || seen[i.GetId()] {
			w.Blamef("INSTANCES-2", "an instance is listed with the id %q, which is empty or another's", i.GetId())
		}
		seen[i.GetId()] = true
		scheme, rest, ok := strings.Cut(i.GetId(), "://")
		if i.GetState() == running && (!ok || scheme == "" || rest == "") {
			w.Blamef("INSTANCES-2", "an instance that runs is listed as %q, which is no provider id: want <provider>://<opaque>", i.GetId())
		}
	}
}

func (g *Groups) examineGroup(group *nodegroupv1.Group) {
	w, id := g.witness, group.GetId()
	odd := func(c rune) bool { return !strings.ContainsRune(idLetters, c) }
	if id == "" || strings.ContainsFunc(id, odd) {
		w.Blamef("GROUP-7", "there is a group %q", id)
	}
	if group.GetMinSize() < 0 || group.GetMaxSize() <= 0 || group.GetMinSize() > group.GetMaxSize() {
		w.Blamef("GROUP-8", "group %s has sizes %d to %d", id, group.GetMinSize(), group.GetMaxSize())
	}
	if group.GetTargetSize() < 0 {
		w.Blamef("GROUP-9", "group %s has target size %d", id, group.GetTargetSize())
	}
	if t := group.GetTemplate(); t != nil && (t.GetCapacity()["cpu"] == "" || t.GetCapacity()["memory"] == "") {
		w.Blamef("GROUP-10", "the template of group %s lacks cpu or memory", id)
	}
	w.Leak("STATUSTEXT-1", "the description of group "+id, group.GetDescription())
}
