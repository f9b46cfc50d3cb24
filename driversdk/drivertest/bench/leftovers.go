package bench

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// listPause is between two lists, as clouds limit how often they are asked.
const listPause = 500 * time.Millisecond

// An attempt is one at an operation.
type attempt struct {
	operation string
	number    uint32
}

// A leftover is an instance of one of the bench's machines.
type leftover struct {
	*driverv1.Instance

	err error // of its last delete
}

// RemoveLeftovers deletes what the list shows of the bench's machines, until it has shown nothing for the driver's settle time,
// and for [Config.LateInstance] more if the outcome of a create is unknown. It fails if that does not come to pass, and names what is left.
func (c *Check) RemoveLeftovers() {
	quiet := c.settle()
	if len(c.Unclear()) > 0 {
		quiet += c.LateInstance
	}
	var left []leftover
	err := c.Try(func() {
		limit := time.Now().Add(c.Late() + 2*quiet)
		for since := time.Now(); ; c.Pause(listPause) {
			left = c.removeListed()
			if len(left) > 0 {
				since = time.Now()
			} else if time.Since(since) >= quiet {
				return
			}
			if time.Now().After(limit) {
				c.Failf("the list still shows them")
			}
		}
	})
	if err == nil {
		return
	}
	var names []string
	for _, l := range left {
		names = append(names, l.String())
	}
	c.Failf("instances may be left: %s. Look in the cloud for machines named %s* and delete them: %w",
		cmp.Or(strings.Join(names, ", "), "none is known"), c.prefix, err)
}

// Stays reports whether the list shows an instance of the bench's machines.
func (c *Check) Stays() bool {
	return slices.ContainsFunc(c.List(), func(i *driverv1.Instance) bool { return c.machineOf(i) != nil })
}

// Unclear returns the names of machines with a create of unknown outcome: an instance of each may come that no answer has named.
func (b *Bench) Unclear() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	names := map[string]bool{}
	for a := range b.unclear {
		uid, _, _ := strings.Cut(a.operation, ".")
		name := b.prefix + "*"
		if m := b.everyMachine[uid]; m != nil {
			name = m.GetName()
		}
		names[name] = true
	}

	return slices.Sorted(maps.Keys(names))
}

// noteOutcome remembers creates whose outcome is unknown. b.mu is held.
func (b *Bench) noteOutcome(x *Exchange, f Frame) {
	r := f.GetResult()
	switch {
	case f.GetAccepted() != nil && x.verb == bus.Verb(Create):
		b.unclear[attempt{x.id, f.GetAttempt()}] = true
	case r == nil || r.GetStatus().GetCode() == driverv1.Code_CODE_DEADLINE_EXCEEDED:
	case !r.GetOutcomeUnknown():
		maps.DeleteFunc(b.unclear, func(a attempt, _ bool) bool { return a.operation == x.id })
	case r.GetNoEffect():
		delete(b.unclear, attempt{x.id, f.GetAttempt()})
	}
}

// removeListed asks for the deletion of each instance of the bench's machines that the list shows, and returns those.
func (c *Check) removeListed() (left []leftover) {
	for _, i := range c.List() {
		if m := c.machineOf(i); m != nil {
			left = append(left, leftover{i, c.Try(m.Remove)})
		}
	}

	return left
}

// machineOf returns the machine to delete an instance by; nil if it is none of the bench's.
func (c *Check) machineOf(i *driverv1.Instance) *Machine {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.everyMachine[i.GetMachineUid()]
	for _, other := range c.everyMachine {
		if m == nil && i.GetMachineUid() == "" && other.GetName() == i.GetMachineName() {
			m = other
		}
	}
	if m == nil && strings.HasPrefix(i.GetMachineName(), c.prefix) {
		m = &Machine{Machine: &driverv1.Machine{Namespace: c.Class.Namespace, Name: i.GetMachineName(), Uid: cmp.Or(i.GetMachineUid(), uid())}}
		c.everyMachine[m.GetUid()] = m
	}
	if m != nil {
		m.c, m.ProviderId = c, i.GetProviderId()
	}

	return m
}

// String names an instance, and why it is still there.
func (l leftover) String() string {
	text := fmt.Sprintf("%s of machine %s", l.GetProviderId(), l.GetMachineName())
	if l.err != nil {
		text += fmt.Sprintf(" (%v)", l.err)
	}

	return text
}
