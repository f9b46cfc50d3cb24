package bench

import (
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// The mutations that most checks ask for.
const (
	Create = driverv1.Operation_OPERATION_CREATE
	Delete = driverv1.Operation_OPERATION_DELETE
)

// A Machine is what a check asks instances for.
type Machine struct {
	*driverv1.Machine

	c          *Check
	operations int
}

// NewMachine makes up a machine; its instances are removed after the check.
func (c *Check) NewMachine() *Machine {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.made++
	m := &Machine{c: c, Machine: &driverv1.Machine{
		Namespace: c.Class.Namespace, Name: fmt.Sprintf("%s%d", c.prefix, c.made), Uid: uid(),
	}}
	c.machines = append(c.machines, m)
	c.everyMachine[m.GetUid()] = m

	return m
}

// Namesake makes up another machine of the same name.
func (m *Machine) Namesake() *Machine {
	other := m.c.NewMachine()
	other.Name = m.GetName()

	return other
}

func uid() string {
	b := make([]byte, 16)
	_, _ = rand.Read(b) // never fails

	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// body returns what is asked for by an operation on the machine.
func (m *Machine) body(op driverv1.Operation) *driverv1.Envelope {
	machine, class := proto.CloneOf(m.Machine), m.c.Fetches.Refs()
	switch op {
	case Create:
		return &driverv1.Envelope{Body: &driverv1.Envelope_Create{Create: &driverv1.CreateRequest{Machine: machine, Class: class}}}
	case Delete:
		return &driverv1.Envelope{Body: &driverv1.Envelope_Delete{Delete: &driverv1.DeleteRequest{Machine: machine, Class: class}}}
	case driverv1.Operation_OPERATION_INITIALIZE:
		return &driverv1.Envelope{Body: &driverv1.Envelope_Initialize{Initialize: &driverv1.InitializeRequest{Machine: machine, Class: class}}}
	default:
		return &driverv1.Envelope{Body: &driverv1.Envelope_Status{Status: &driverv1.StatusRequest{Machine: machine, Class: class}}}
	}
}

// An Operation is a mutation of a machine under its id. It can be asked for several times.
type Operation struct {
	*Machine

	ID string
	Op driverv1.Operation
}

// Operation makes up the machine's next operation.
func (m *Machine) Operation(op driverv1.Operation) *Operation {
	m.operations++

	return &Operation{Machine: m, ID: fmt.Sprintf("%s.%s.%d", m.GetUid(), bus.Verb(op), m.operations-1), Op: op}
}

// Send asks for the operation, with the terms of the machine's claim.
func (o *Operation) Send(changes ...Change) *Exchange {
	env := o.c.Envelope(o.ID, o.body(o.Op))
	if !o.c.Plain {
		sequence, _ := o.Claim()
		env.ClaimTerms = &driverv1.ClaimTerms{Sequence: &sequence}
	}
	for _, change := range changes {
		change(env)
	}

	return o.c.Send(Request{Subject: o.c.Subject(bus.Verb(o.Op), o.GetName()), Env: env})
}

// Result has the operation done and does not acknowledge it. A replica that is busy is asked again for a while: the
// operations stream may not answer at once.
func (o *Operation) Result(changes ...Change) (result *driverv1.Result) {
	o.c.Eventually("the replica takes a "+bus.Verb(o.Op), func() bool {
		result = o.Send(changes...).Settled()

		return result != nil
	})

	return result
}

// Run has the operation done and acknowledges it.
func (o *Operation) Run(changes ...Change) *driverv1.Result {
	result := o.Result(changes...)
	o.Acknowledge()

	return result
}

// Acknowledge lets the replica forget the result.
func (o *Operation) Acknowledge() {
	o.control("ack", &driverv1.Envelope{Body: &driverv1.Envelope_Acknowledge{Acknowledge: &driverv1.Acknowledge{OperationId: o.ID}}})
}

// Cancel asks the replica to end the operation.
func (o *Operation) Cancel() {
	o.control("cancel", &driverv1.Envelope{Body: &driverv1.Envelope_Cancel{Cancel: &driverv1.Cancel{OperationId: o.ID}}})
}

// control sends the replica a message that is not answered.
func (o *Operation) control(verb string, env *driverv1.Envelope) {
	if c := o.c; !c.Plain {
		env.OperationId, env.Epoch = o.ID, c.Epoch
		c.Publish(&nats.Msg{Subject: c.Below("replica." + c.Provider + "." + c.Target + "." + verb), Data: c.Encode(env, "")})
	}
}

// Held asks the replica what it holds of the operation.
func (o *Operation) Held() *driverv1.OpsResponse { return o.c.Ops(o.ID, 0) }

// Do has a new operation done.
func (m *Machine) Do(op driverv1.Operation, changes ...Change) *driverv1.Result {
	return m.Operation(op).Run(changes...)
}

// Created returns the provider id that a create returned, and fails if it did not succeed.
func (c *Check) Created(result *driverv1.Result) (providerID string) {
	c.Want(driverv1.Code_CODE_OK, "create", result)
	if providerID = result.GetCreate().GetInstance().GetProviderId(); providerID == "" {
		c.Failf("create succeeded without an instance that has a provider_id")
	}

	return providerID
}

// Remove has the machine's instance deleted, by a new operation, and fails if that fails.
func (m *Machine) Remove() { m.c.Want(driverv1.Code_CODE_OK, "delete", m.Do(Delete)) }

// Status asks for the machine's instance. A driver that does not implement it ends the check.
func (m *Machine) Status() *driverv1.Result {
	return m.c.optional(driverv1.Operation_OPERATION_STATUS, m.StatusResult)
}

// StatusResult is Status of any driver.
func (m *Machine) StatusResult() *driverv1.Result {
	return m.c.Send(m.c.readRequest(m.GetName(), m.body(driverv1.Operation_OPERATION_STATUS))).Result()
}

// Initialize has the machine's instance initialized. A driver that does not implement it ends the check.
func (m *Machine) Initialize() {
	const op = driverv1.Operation_OPERATION_INITIALIZE
	m.c.Want(driverv1.Code_CODE_OK, "initialize", m.c.optional(op, func() *driverv1.Result { return m.Do(op) }))
}

// Listed returns the provider ids of the machine's instances in the list as it is.
func (m *Machine) Listed() []string {
	var ids []string
	for _, i := range m.c.List() {
		if i.GetMachineUid() == m.GetUid() || i.GetMachineUid() == "" && i.GetMachineName() == m.GetName() {
			ids = append(ids, i.GetProviderId())
		}
	}
	slices.Sort(ids)

	return ids
}

// None fails if the machine has an instance, once the list has settled. Why says why it must not.
func (m *Machine) None(why string) {
	m.c.Settle()
	if ids := m.Listed(); len(ids) > 0 {
		m.c.Failf("%s, and yet there is an instance: %s", why, strings.Join(ids, ", "))
	}
}

// One fails unless the machine has this instance and no other.
func (m *Machine) One(providerID string) {
	var ids []string
	m.c.Eventually("list shows the instance", func() bool {
		m.c.Settle()
		ids = m.Listed()

		return len(ids) > 0
	})
	if len(ids) != 1 || ids[0] != providerID {
		m.c.Failf("want one instance, %s, and list shows %s", providerID, strings.Join(ids, ", "))
	}
}

// Gone waits until list shows nothing of the machine: the driver may be removing it.
func (m *Machine) Gone() {
	var ids []string
	if !m.c.Poll(m.c.Patience, func() bool {
		ids = m.Listed()

		return len(ids) == 0
	}) {
		m.c.Failf("delete succeeded, and yet list shows %s", strings.Join(ids, ", "))
	}
}

// RemoveMachines removes what the machines so far may have. A machine that it cannot remove stays for the next time.
func (c *Check) RemoveMachines() {
	c.mu.Lock()
	machines := c.machines
	c.machines = nil
	c.mu.Unlock()
	var errs []error
	for _, m := range machines {
		m.c, m.ProviderId = c, "" // all that carry the machine's uid
		if err := c.Try(m.Remove); err != nil {
			errs = append(errs, fmt.Errorf("machine %s: %w", m.GetName(), err))
			c.mu.Lock()
			c.machines = append(c.machines, m)
			c.mu.Unlock()
		}
	}
	c.Must(errors.Join(errs...))
}
