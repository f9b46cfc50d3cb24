package drivertest

import (
	"errors"
	"fmt"

	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// preflight ends the check where all clauses would fail for one reason: the driver does not answer or gets no class, it
// refuses the class, or its cloud refuses the credentials or cannot be reached.
func (c *check) preflight() {
	// It was asked for nothing before, so it has no class yet.
	before := c.Fetches.Count(bench.FetchClass)
	c.ready("list", c.ListResult)
	c.suite.listsByClass = c.Fetches.Count(bench.FetchClass) > before
	c.ready("validate", func() *driverv1.Result { return validate(c) })
}

// ready fails if the driver does not do what it can do where nothing is amiss. What it does not implement is fine.
func (c *check) ready(verb string, ask func() *driverv1.Result) {
	var r *driverv1.Result
	err := c.Try(func() { r = ask() })
	if _, unbound := errors.AsType[bench.SkipError](err); unbound {
		return
	}
	if outside := c.Fetches.Seen().Outside; len(outside) > 0 {
		c.Failf("the driver gets no class, as it has answers sent to %s [FETCH-1]: give its connection the inbox prefix %s",
			outside[0], c.Fetches.InboxPrefix())
	}
	if err != nil {
		c.Failf("the driver is on the bus, but did not answer [%s]: %w: read its log", c.answers(), err)
	}
	if code := r.GetStatus().GetCode(); code != ok {
		c.Failf("the driver cannot be checked: %s was answered %s: %s", verb, bench.Said(r), c.remedy(code))
	}
}

// answers is the clause by which a driver has to answer at all.
func (c *check) answers() string {
	if c.Plain {
		return "SUBJECT-3"
	}

	return "SUBJECT-2"
}

// remedy says what to mend when the driver answers with this code before anything was made.
func (c *check) remedy(code driverv1.Code) string {
	class := c.Class.Namespace + "/" + c.Class.Name
	switch code {
	case driverv1.Code_CODE_INVALID_ARGUMENT, driverv1.Code_CODE_FAILED_PRECONDITION, driverv1.Code_CODE_NOT_FOUND:
		return fmt.Sprintf("mend MachineClass %s (Config.Class, --class)", class)
	case driverv1.Code_CODE_UNAUTHENTICATED, driverv1.Code_CODE_PERMISSION_DENIED:
		return fmt.Sprintf("mend the credentials in the Secret that MachineClass %s refers to (Config.Secrets, --secret)", class)
	case driverv1.Code_CODE_UNAVAILABLE, driverv1.Code_CODE_DEADLINE_EXCEEDED:
		return fmt.Sprintf("make sure that the driver can reach its cloud (its flags, or MachineClass %s)", class)
	default:
		return "mend that first, and read the driver's log"
	}
}
