package bench

import (
	"context"
	"time"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// Silence is how long a check listens for what must not come.
const Silence = 300 * time.Millisecond

// ByProcess says, in the reason of a skip, what lets a driver be stopped and started.
const ByProcess = "(Config.Process, or its command line after -- of driver-conformance)"

// A Check is one look at the driver, by what its Runner lets run.
type Check struct {
	*Bench
	*Runner

	Stream Stream
}

// Run runs a check and its cleanups. It returns nil, a [SkipError], or what is wrong with the driver.
func (b *Bench) Run(ctx context.Context, f func(*Check)) error {
	r := &Runner{ctx: ctx, patience: b.Patience, settle: func() time.Duration { return b.Session().GetSettleTime().AsDuration() }}

	return r.run(func() { f(&Check{b, r, Stream{r, b}}) })
}

// Want fails unless a result has this code.
func (c *Check) Want(code driverv1.Code, what string, r *driverv1.Result) {
	if r.GetStatus().GetCode() != code {
		c.Failf("%s was answered %s, not %s", what, Said(r), bus.CodeName(code))
	}
}

// Implements ends the check if the driver's sessions do not name an operation. A plain driver has none.
func (c *Check) Implements(op driverv1.Operation) {
	if !c.Plain && !c.Serves(op) {
		c.Unboundf("the driver does not implement %s", bus.Verb(op))
	}
}

// optional has an operation done that a driver need not implement: one that does not ends the check. A plain driver says so
// in its result.
func (c *Check) optional(op driverv1.Operation, do func() *driverv1.Result) *driverv1.Result {
	c.Implements(op)
	result := do()
	if c.Plain && result.GetStatus().GetCode() == driverv1.Code_CODE_UNIMPLEMENTED {
		c.Unboundf("the driver does not implement %s", bus.Verb(op))
	}

	return result
}
