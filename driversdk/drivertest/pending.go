package drivertest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// windows is how often a check that depends on time is tried: a slow machine makes the best driver late, and no bad one
// punctual.
const windows = 5

// noClass: there is no class to be had.
var noClass = bench.Answers{NoClass: true}

// A pending mutation is one that the driver has and cannot go on with until release, because its
// class is not answered, or its cloud does not answer.
type pending struct {
	*bench.Operation

	x       *bench.Exchange
	release func()
	timeout time.Duration // of one that is at the cloud
}

// begin sends a mutation whose class is held back and returns when the replica has
// accepted it and waits for the class.
func (c *check) begin(op driverv1.Operation) *pending { return c.beginFor(c.NewMachine(), op) }

func (c *check) beginFor(m *bench.Machine, op driverv1.Operation) *pending {
	p := &pending{Operation: m.Operation(op), release: c.HoldFetches()}
	c.Eventually("the replica takes an operation", func() bool {
		p.x = p.Send()

		return p.x.Taken()
	})
	if !c.Poll(c.Patience, func() bool { return c.Fetches.Seen().Waiting > 0 }) {
		c.Skipf("the driver does not ask for the class of an operation, by which the suite could hold it up")
	}

	return p
}

// atCloud sends a create and returns when the cloud is at it. On a slow machine
// the time may be over before: then there is more of it for the next one.
func (c *check) atCloud(timeout time.Duration) *pending {
	if c.Cloud.Hold == nil || c.Cloud.Held == nil {
		c.Skipf("needs a cloud that holds a create up (Config.Cloud.Hold)")
	}
	for range windows {
		if p := c.atCloudWithin(timeout); p != nil {
			return p
		}
		timeout *= 2
	}
	c.Failf("the create did not reach the cloud in its time")

	return nil
}

// atCloudWithin returns nil if the create did not reach the cloud in this time.
func (c *check) atCloudWithin(timeout time.Duration) *pending {
	p := &pending{Operation: c.NewMachine().Operation(create), timeout: timeout}
	release, err := c.Cloud.Hold(c.Context(), p.GetName())
	c.Must(err)
	p.release = sync.OnceFunc(release)
	c.Cleanup(p.release)
	p.x = p.Send(within(timeout))
	if !c.Plain { // which would answer with its result only
		p.x.Want("a create", bench.Accepted)
	}
	limit, cancel := context.WithTimeout(c.Context(), timeout+bench.Silence)
	defer cancel()
	if err = c.Cloud.Held(limit, p.GetName()); err != nil && errors.Is(limit.Err(), context.DeadlineExceeded) && c.Context().Err() == nil {
		p.release()

		return nil
	}
	c.Must(err)

	return p
}

// finish lets the mutation go on and returns its result.
func (p *pending) finish() *driverv1.Result {
	p.release()
	result := p.x.Result()
	if !result.GetOutcomeUnknown() {
		p.Acknowledge()
	}

	return result
}

// askAgain asks for a mutation that runs, by a request that differs, and waits until the replica has accepted it.
func (p *pending) askAgain(changes ...bench.Change) *bench.Exchange {
	x := p.Send(changes...)
	x.Want("a request for an operation that runs", bench.Accepted)

	return x
}

// A done mutation is one whose result was not acknowledged.
type done struct {
	*bench.Operation

	result *driverv1.Result
}

// once has a mutation done without acknowledging it. On a slow machine the
// operations stream may not answer in time: another one is asked for then.
func (c *check) once(op driverv1.Operation) *done {
	d := &done{}
	for range firstTries {
		d.Operation = c.NewMachine().Operation(op)
		if d.result = d.Result(); !d.result.GetOutcomeUnknown() {
			break
		}
	}
	c.Eventually("operation "+d.ID+" is claimed", func() bool { return d.claimed() > 0 })

	return d
}

// onceInVain is once without a class to be had.
func (c *check) onceInVain(op driverv1.Operation) (d *done) {
	c.Fetches.With(noClass, func() { d = c.once(op) })

	return d
}

// claimed returns how often the operation was claimed.
func (d *done) claimed() int { return len(d.Claims(driverv1.Claim_STATE_RUNNING)) }

// listedAs reports whether a session lists an operation in a state that is wanted.
func listedAs(s bench.Session, id string, wanted func(*driverv1.OperationState) bool) bool {
	return slices.ContainsFunc(s.GetOperations(), func(o *driverv1.OperationState) bool { return o.GetOperationId() == id && wanted(o) })
}

// repeated asks for an operation again that has a result: it must be the same, and the
// operation must not be run for it.
func (c *check) repeated(d *done) {
	c.Fetches.Touch() // a replica that runs it needs the class again
	fetched, claimed := c.Fetches.Count(bench.FetchClass), d.claimed()
	again := d.Result()
	if c.Fetches.Count(bench.FetchClass) != fetched || d.claimed() != claimed {
		c.Failf("asked for again, its operation was run again")
	}
	if !proto.Equal(again, d.result) {
		c.Failf("asked for again, it was %s, after %s", bench.Said(again), bench.Said(d.result))
	}
}
