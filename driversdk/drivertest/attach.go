package drivertest

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// checkAttach asks for operations that the replica has already: one that runs, one whose
// result it keeps, one that failed before another attempt, and one that another attempt
// has superseded.
func checkAttach(c *check) {
	c.Step("asked for an operation that runs", func() { attaches(c) })
	d := c.onceInVain(remove)
	c.Step("a result that is kept", func() { c.repeated(d) })
	d.Acknowledge()
	c.Step("a failure that is kept, asked for by a later attempt while the call of one in between may run", func() { outdated(c) })
	c.Step("a result that is kept, asked for by the sequence of a record of its claim", func() { attachesToRecords(c) })
	c.Step("with another replica's attempt in between", func() { superseded(c) })
}

// attempt makes a request one for this attempt, with recover.
func attempt(n uint32) bench.Change {
	return func(env *driverv1.Envelope) { env.Recover, env.Attempt = true, n }
}

// attaches asks for a running operation by later attempts, whose frames they are from
// then on.
func attaches(c *check) {
	p := c.begin(create)
	p.askAgain(recovering)
	var x *bench.Exchange
	c.Step("by a request that leaves the sequence of its claim unset", func() { x = p.askAgain(attempt(3), unset) })
	p.release()
	providerID := c.Created(x.Result())
	both := alsoEarlier(c, p)
	p.Acknowledge()
	_, _, misnumbered := x.Tally()
	if both {
		c.Failf("the result went to the earlier reply subject as well")
	}
	if misnumbered {
		c.Failf("a frame does not say attempt %d, which is the one that asked last", x.Attempt)
	}
	p.One(providerID)
}

// alsoEarlier reports whether a result came to where the operation was asked for
// first. One that was made a second time may come a moment after the other.
func alsoEarlier(c *check, p *pending) bool {
	const moment = 500 * time.Millisecond

	return c.Poll(moment, func() bool { _, results, _ := p.x.Tally(); return results > 0 })
}

// attachesToRecords asks for later attempts at a create, each by another sequence at
// which its claim has been: mcm may have read any of them.
func attachesToRecords(c *check) {
	d := c.once(create)
	d.Ended()
	later := slices.Concat(d.Claims(driverv1.Claim_STATE_BEGUN), d.Claims(driverv1.Claim_STATE_SETTLED))
	for n, record := range later { // each expected the sequence of the one before
		sequence, err := strconv.ParseUint(record.Expected, 10, 64)
		if err != nil {
			return // which is another clause's to blame
		}
		c.Step(fmt.Sprintf("as it was before it was %s", record.GetState()), func() {
			again := d.Result(attempt(uint32(n)+2), func(env *driverv1.Envelope) { env.ClaimTerms = &driverv1.ClaimTerms{Sequence: &sequence} })
			if d.claimed() != 1 {
				c.Failf("its operation was run again")
			}
			if !proto.Equal(again, d.result) {
				c.Failf("it was %s, after %s", bench.Said(again), bench.Said(d.result))
			}
		})
	}
	d.Acknowledge()
}

// outdated has a create fail, and asks for a later attempt at it while one in between
// may run.
func outdated(c *check) {
	d := c.onceInVain(create)
	if d.result.GetStatus().GetCode() == ok { // it needs no class
		return
	}
	// Terms with a sequence that the replica has not heard of yet would name another claim.
	if c.Try(func() { d.Ended() }) != nil {
		return // which is another clause's to blame
	}
	c.AwaitSession(c.Session().GetSequence())
	if result := d.Run(doubting); !result.GetOutcomeUnknown() { // the stream may not have answered in time
		c.Created(result)
	}
}

// superseded asks for a third attempt after a second one of another replica: the first is
// no answer to that, neither while it runs nor when it has ended.
func superseded(c *check) {
	p := c.begin(remove)
	p.Usurp()
	p.Send(attempt(3)).Want("a request for the third attempt, while the first runs,", bench.Busy(driverv1.BusyReason_BUSY_REASON_MACHINE))
	p.release()
	p.x.Result()
	p.Run(attempt(3))
	if !c.Poll(c.Patience, func() bool {
		return slices.ContainsFunc(p.Claims(driverv1.Claim_STATE_RUNNING), func(r bench.Claimed) bool { return r.GetAttempt() == 3 })
	}) {
		c.Failf("a request for the third attempt was answered with the result of the first")
	}
}
