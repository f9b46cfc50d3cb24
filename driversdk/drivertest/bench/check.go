package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// Silence is how long a check listens for what must not come.
const Silence = 300 * time.Millisecond

// ByProcess says, in the reason of a Skip, what lets a driver be stopped and started.
const ByProcess = "(Config.Process, or its command line after -- of driver-conformance)"

// A Check is one look at the driver. As with a testing.T, a method that finds something wrong
// ends the check: it reads as the list of what must hold. All of it runs on one goroutine.
type Check struct {
	*Bench

	ctx      context.Context
	steps    []string
	cleanups []func()
	err      error
}

// Skip is the error of a check that could not be made.
type Skip struct {
	reason string
	// Unbound: the clause does not bind the driver.
	Unbound bool
}

func (s Skip) Error() string { return s.reason }

// Run runs f and its cleanups. It returns nil, a [Skip], or what is wrong with the driver.
func (b *Bench) Run(ctx context.Context, f func(*Check)) error {
	c := &Check{Bench: b, ctx: ctx}
	err := c.Try(func() { f(c) })
	for _, cleanup := range slices.Backward(c.cleanups) {
		failed := c.Try(cleanup)
		if _, skipped := errors.AsType[Skip](err); skipped && failed != nil {
			err = nil // it counts as failed
		}
		err = errors.Join(err, failed)
	}

	return err
}

// Try runs a part of the check, and returns the error that ended it.
func (c *Check) Try(f func()) error {
	done := make(chan struct{})
	go func() { // which Goexit ends
		defer close(done)
		f()
	}()
	<-done
	err := c.err
	c.err = nil

	return err
}

// Cleanup has f run when the check has ended.
func (c *Check) Cleanup(f func()) { c.cleanups = append(c.cleanups, f) }

// Context ends with the check.
func (c *Check) Context() context.Context { return c.ctx }

// Step runs a part of the check; what names it in errors.
func (c *Check) Step(what string, f func()) {
	c.steps = append(c.steps, what)
	defer func() { c.steps = c.steps[:len(c.steps)-1] }()
	f()
}

// Must ends the check if err is not nil.
func (c *Check) Must(err error) {
	if err == nil {
		return
	}
	if _, skipped := errors.AsType[Skip](err); !skipped && len(c.steps) > 0 {
		err = fmt.Errorf("%s: %w", strings.Join(c.steps, ": "), err)
	}
	c.err = errors.Join(c.err, err)
	runtime.Goexit()
}

// Failf ends the check: the driver breaks the clause.
func (c *Check) Failf(format string, args ...any) { c.Must(fmt.Errorf(format, args...)) }

// Skipf ends the check: the clause binds the driver, and cannot be checked here.
func (c *Check) Skipf(format string, args ...any) { c.Must(Skip{reason: fmt.Sprintf(format, args...)}) }

// Unboundf ends the check: the clause does not bind the driver, by what it says of itself.
func (c *Check) Unboundf(format string, args ...any) {
	c.Must(Skip{reason: fmt.Sprintf(format, args...), Unbound: true})
}

// Want fails unless a result has this code.
func (c *Check) Want(code driverv1.Code, what string, r *driverv1.Result) {
	if r.GetStatus().GetCode() != code {
		c.Failf("%s was answered %s, not %s", what, Said(r), bus.CodeName(code))
	}
}

// Poll calls ok until it returns true, for as long as most and the driver's settle time. It
// reports whether ok did.
func (c *Check) Poll(most time.Duration, ok func() bool) bool {
	limit := time.NewTimer(most + c.Session().GetSettleTime().AsDuration())
	defer limit.Stop()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-limit.C:
			return false
		case <-c.ctx.Done():
			c.Must(context.Cause(c.ctx))
		}
	}

	return true
}

// Within fails unless ok returns true in time; see [Check.Poll].
func (c *Check) Within(most time.Duration, what string, ok func() bool) {
	if !c.Poll(most, ok) {
		c.Failf("waited in vain until %s", what)
	}
}

// Eventually is Within for as long as the check has patience.
func (c *Check) Eventually(what string, ok func() bool) { c.Within(c.Patience, what, ok) }

// Pause waits where no event says that the time has come, such as for a frame that must not come.
func (c *Check) Pause(d time.Duration) {
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.ctx.Done():
		c.Must(context.Cause(c.ctx))
	}
}

// Settle waits for as long as the cloud's list may lag behind.
func (c *Check) Settle() { c.Pause(c.Session().GetSettleTime().AsDuration()) }

// Implements ends the check if the driver's sessions do not name an operation. A plain driver has none.
func (c *Check) Implements(op driverv1.Operation) {
	if !c.Plain && !c.Serves(op) {
		c.Unboundf("the driver does not implement %s", bus.Verb(op))
	}
}

// implemented ends the check if this result is how a plain driver says that it does not implement an operation.
func (c *Check) implemented(op driverv1.Operation, result *driverv1.Result) {
	if c.Plain && result.GetStatus().GetCode() == driverv1.Code_CODE_UNIMPLEMENTED {
		c.Unboundf("the driver does not implement %s", bus.Verb(op))
	}
}
