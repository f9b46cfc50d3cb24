package drivertest

import (
	"strings"

	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

// groupIDLetters are all that ids of groups may be made of.
const groupIDLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._/-"

// witnessGroup holds every answer about node groups against what is said of all.
func (s *suite) witnessGroup(c *groupCall, a *nodegroupv1.Envelope) {
	if a.GetRequestId() != c.id {
		s.blamef("GROUP-2", "the answer to %s says request %q, where the request said %q", c.verb, a.GetRequestId(), c.id)
	}
	s.mu.Lock()
	came := c.came
	s.mu.Unlock()
	if came > 1 {
		s.blamef("GROUP-2", "%s was answered %d times", c.verb, came)
	}
	s.leak("STATUSTEXT-1", "the status of "+c.verb, a.GetStatus().GetMessage())
	for _, g := range a.GetGroupsFound().GetGroups() {
		s.witnessGroupOf(g)
	}
	seen := map[string]bool{}
	for _, i := range a.GetInstancesFound().GetInstances() {
		s.leak("STATUSTEXT-1", "the error of instance "+i.GetId(), i.GetError().GetMessage())
		if i.GetId() == "" || seen[i.GetId()] {
			s.blamef("INSTANCES-2", "an instance is listed with the id %q, which is empty or another's", i.GetId())
		}
		seen[i.GetId()] = true
		scheme, rest, ok := strings.Cut(i.GetId(), "://")
		if i.GetState() == nodegroupv1.InstanceState_INSTANCE_STATE_RUNNING && (!ok || scheme == "" || rest == "") {
			s.blamef("INSTANCES-2", "an instance that runs is listed as %q, which is no provider id: want <provider>://<opaque>", i.GetId())
		}
	}
}

func (s *suite) witnessGroupOf(g *nodegroupv1.Group) {
	odd := func(c rune) bool { return !strings.ContainsRune(groupIDLetters, c) }
	if g.GetId() == "" || strings.ContainsFunc(g.GetId(), odd) {
		s.blamef("GROUP-7", "there is a group %q", g.GetId())
	}
	if g.GetMinSize() < 0 || g.GetMaxSize() <= 0 || g.GetMinSize() > g.GetMaxSize() {
		s.blamef("GROUP-8", "group %s has sizes %d to %d", g.GetId(), g.GetMinSize(), g.GetMaxSize())
	}
	if g.GetTargetSize() < 0 {
		s.blamef("GROUP-9", "group %s has target size %d", g.GetId(), g.GetTargetSize())
	}
	if t := g.GetTemplate(); t != nil && (t.GetCapacity()["cpu"] == "" || t.GetCapacity()["memory"] == "") {
		s.blamef("GROUP-10", "the template of group %s lacks cpu or memory", g.GetId())
	}
	s.leak("STATUSTEXT-1", "the description of group "+g.GetId(), g.GetDescription())
}
