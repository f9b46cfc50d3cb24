package drivertest

import (
	"fmt"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

var deleteClauses = []Clause{
	{ID: "DELETE-1", Says: "Delete of an absent instance succeeds", check: checkDeleteAbsent},
	{ID: "DELETE-2", Says: "Delete finds the instance by provider id, else by name and uid", check: checkDeleteFinds},
	{ID: "DELETE-3", Says: "what Delete removed does not come back", check: checkDeleteForGood},
}

func checkDeleteAbsent(c *check) {
	for range c.Repeat {
		c.Step("of a machine that never had an instance", c.NewMachine().Remove)
	}
	m := c.firstNamed()
	for n := range 1 + c.Repeat {
		c.Step(fmt.Sprintf("deletion %d of one instance", n+1), m.Remove)
	}
}

// checkDeleteFinds deletes an instance by its machine's name and uid, and one by its provider id alone: a machine that was
// made again has another uid than its instance says, and an instance that belongs to no machine may say none.
func checkDeleteFinds(c *check) {
	c.Step("by name and uid", func() {
		m := c.first()
		m.Remove()
		m.Gone()
	})
	c.Step("by provider id, for a machine of another name and uid", func() {
		m, by := c.first(), c.NewMachine()
		by.ProviderId = m.providerID
		by.Remove()
		m.Gone()
	})
}

func checkDeleteForGood(c *check) {
	m := c.firstNamed()
	// Most drivers fail while no manager answers their fetches; one that does not must have done it.
	var result *driverv1.Result
	c.WithoutManager(func() { result = m.Do(remove) })
	if result.GetStatus().GetCode() == ok {
		m.Gone()
	}
	m.Remove()
	m.Gone()
	for range c.Repeat {
		m.None("delete succeeded")
	}
}
