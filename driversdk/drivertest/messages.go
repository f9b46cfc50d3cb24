package drivertest

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

var messageClauses = []Clause{
	{ID: "SUBJECT-1", Says: "listens on the provider's driver tree in queue group driver", binds: full, check: checkQueue},
	{ID: "SUBJECT-2", Says: "listens on its replica tree", binds: full, check: checkReplicaTree},
	{ID: "SUBJECT-3", Says: "a plain driver answers each request with one result, in queue group driver", binds: plainly, check: checkQueue},
	{ID: "SUBJECT-4", Says: "answers below the provider's reply tree only", check: checkReplyTree},
	{ID: "ENV-1", Says: "JSON goes with the header Content-Type: application/json", check: checkContentType},
	{ID: "ENV-2", Says: "answers JSON with JSON", check: checkJSON},
	{ID: "ENV-3", Says: "sends no empty frame", check: checkEmpty},
	{ID: "ENV-4", Says: "ignores unknown fields and answers unknown bodies with Unimplemented", check: checkUnknown},
	{ID: "ENV-6", Says: "refuses mutations of a lower epoch with Aborted, outcome unknown, and serves reads", binds: full, check: checkEpoch},
	{ID: "HELLO-2", Says: "answers busy while the manager that leads speaks none of its versions of the contract", binds: full, check: checkProtocol},
	{ID: "ENV-8", Says: "answers stale mutations busy", check: refused("a stale create", stale, bench.Busy())},
}

func checkQueue(c *check) {
	tree := c.Below("driver." + c.Provider + ".")
	if c.Plain {
		tree = c.Below("plain." + c.Provider + ".")
	}
	c.Shared(tree+">", c.ListWhenFree, func() *bench.Exchange {
		r := c.ListRequest()
		r.Subject = tree + "list." + c.Class.Namespace + "." + c.Class.Name

		return c.Send(r)
	})
}

func checkReplicaTree(c *check) {
	c.List() // is sent there
	c.Ops("", 0)
}

func checkReplyTree(c *check) { c.Elsewhere(c.ListRequest, func() { c.List() }) }

func (c *check) listInJSON() bench.Frame {
	r := c.ListRequest()
	r.JSON = true

	return c.Send(r).Until(c.Late(), func(f bench.Frame) bool { return f.GetResult() != nil })
}

func checkContentType(c *check) {
	if f, came := c.Send(c.ListRequest()).First(c.Late()); !came || f.ContentType == bus.ContentTypeJSON {
		c.Failf("a protobuf request was not answered, or in JSON")
	}
	if f := c.listInJSON(); f.ContentType != bus.ContentTypeJSON {
		c.Failf("the answer to a JSON request has Content-Type %q", f.ContentType)
	}
}

func checkJSON(c *check) {
	f := c.listInJSON()
	if f.ContentType != bus.ContentTypeJSON {
		c.Failf("a list in JSON was answered with Content-Type %q", f.ContentType)
	}
	c.Want(ok, "a list in JSON", f.GetResult())
	c.Fetches.With(noClass, func() { f = c.listInJSON() })
	if f.ContentType != bus.ContentTypeJSON {
		c.Failf("a list in JSON failed, and its answer has Content-Type %q", f.ContentType)
	}
	c.NewMachine().None("nothing was made")
}

// checkEmpty sends what NATS itself sends when no subscriber is there, and nonsense.
func checkEmpty(c *check) {
	for what, payload := range map[string][]byte{"an empty request": {}, "a request that is no envelope": {0xff, 0xff, 0xff}} {
		x := c.Send(bench.Request{Subject: c.Subject("list", c.Class.Name), Payload: payload})
		c.Step("after "+what, func() { c.List() })
		if f, came := x.Next(bench.Silence); came && f.Empty {
			c.Failf("%s was answered with an empty frame", what)
		}
	}
	c.Witnessed("ENV-3")
}

// checkUnknown sends fields with numbers that no field of an Envelope has.
func checkUnknown(c *check) {
	list, teleport := c.ListRequest(), c.ListRequest()
	addUnknown(list.Env, 3000)
	c.Want(ok, "a request with an unknown field", c.Send(list).Result())
	teleport.Env.Body, teleport.Subject = nil, c.Subject("teleport", c.Class.Name)
	addUnknown(teleport.Env, 2000)
	c.Want(driverv1.Code_CODE_UNIMPLEMENTED, "a request with an unknown body", c.Send(teleport).Result())
}

// addUnknown adds a field of a newer contract.
func addUnknown(m proto.Message, field protowire.Number) {
	m.ProtoReflect().SetUnknown(protowire.AppendString(protowire.AppendTag(nil, field, protowire.BytesType), "of a newer contract"))
}

func checkEpoch(c *check) {
	m := c.NewMachine()
	c.Epoch += 2
	c.Step(fmt.Sprintf("in epoch %d", c.Epoch), m.Remove)
	refusesEpoch(c, m)
	c.Epoch += 2
	c.Hello(nil)
	c.Eventually(fmt.Sprintf("sessions say epoch %d, as a hello did", c.Epoch), func() bool { return c.Session().GetEpoch() >= c.Epoch })
	c.Step("after a hello", func() { refusesEpoch(c, m) })
}

// refusesEpoch asks for a create, and for a list, in the epoch before the present one.
func refusesEpoch(c *check, m *bench.Machine) {
	what := fmt.Sprintf("a create of epoch %d, after one of %d,", c.Epoch-1, c.Epoch)
	result := m.Do(create, func(env *driverv1.Envelope) { env.Epoch = c.Epoch - 1 })
	c.Want(driverv1.Code_CODE_ABORTED, what, result)
	if !result.GetOutcomeUnknown() {
		c.Failf("%s was answered %s, not that the outcome is unknown", what, bench.Said(result))
	}
	m.None("the create was of a lower epoch")
	list := c.ListRequest()
	list.Env.Epoch = c.Epoch - 1
	c.Want(ok, "a list of a lower epoch", c.Send(list).Result())
}

// checkProtocol has a manager lead that speaks none of the replica's versions of the
// contract, and then one that does.
func checkProtocol(c *check) {
	const later = 1000 // no replica speaks it
	m := c.NewMachine()
	c.Cleanup(func() { // the clauses after this one need work to be taken
		c.Hello(nil)
		c.Eventually("a delete is taken again", func() bool { return c.Try(m.Remove) == nil })
	})
	c.Hello(func(h *driverv1.Hello) { h.ProtocolMin, h.ProtocolMax = later, later+1 })
	c.Eventually("a delete is answered busy (BUSY_REASON_PROTOCOL)", func() bool {
		return m.Operation(remove).Send().Answer().GetBusy().GetReason() == driverv1.BusyReason_BUSY_REASON_PROTOCOL
	})
}

// stale makes a request one that was to be accepted a minute ago.
func stale(env *driverv1.Envelope) { env.AcceptBy = timestamppb.New(time.Now().Add(-time.Minute)) }

// refused sends a create, changed, and wants this answer, and no instance.
func refused(what string, change bench.Change, want bench.Want) func(*check) {
	return func(c *check) {
		m := c.NewMachine()
		m.Operation(create).Send(change).Want(what, want)
		m.None(what + " was refused")
	}
}
