package drivertest

import (
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

var fenceClauses = []Clause{
	{ID: "FENCE-1", Says: "starts nothing before its claim says so, in the place of its own", binds: full, check: checkFence},
	{ID: "FENCE-2", Says: "starts nothing by an acknowledgement that came too late", binds: full, check: checkLate},
	{ID: "FENCE-3", Says: "cuts off no call at the cloud for it; asked for again, its result counts once it is stored", binds: full, check: checkFencedCall},
	{ID: "RESULT-4", Says: "does not keep a result that it does not know", binds: full, check: checkUnknownNotKept},
}

// checkFence takes the claim of a create that waits to start from it, in every way that
// there is.
func checkFence(c *check) {
	recordsStart(c)
	c.Step("a create that was accepted before another attempt took its claim's place", func() {
		keepsFrom(c, func(p *pending) { p.Usurp() })
	})
	c.Step("a create that was accepted before its claim was lost along with the operations stream", func() {
		keepsFrom(c, func(*pending) { c.Stream.Lose() })
	})
	c.Step("a create that was accepted before the operations stream ceased to take claims", func() {
		restore := func() {}
		keepsFrom(c, func(*pending) { restore = c.Stream.Refuse() })
		restore()
	})
}

// recordsStart looks for the record in STATE_BEGUN that a create writes before its call.
func recordsStart(c *check) {
	d := c.once(create)
	c.Created(d.result)
	d.Ended()
	d.Acknowledge()
	begun, running := d.Claims(driverv1.Claim_STATE_BEGUN), d.Claims(driverv1.Claim_STATE_RUNNING)
	if len(begun) == 0 {
		c.Failf("a create succeeded, and its claim was never STATE_BEGUN")
	}
	have, want := begun[0].Claim, proto.CloneOf(running[len(running)-1].Claim)
	want.State, want.ClaimedAt = have.GetState(), have.GetClaimedAt()
	if !proto.Equal(have, want) {
		c.Failf("the record by which a create starts is {%v}, not {%v}", have, want)
	}
}

// keepsFrom lets a create go on that has lost its claim. It fails if it was carried out, or has written its claim again.
func keepsFrom(c *check, lose func(*pending)) {
	p := c.begin(create)
	lose(p)
	before, _ := p.Claim()
	result := p.finish()
	if after, _ := p.Claim(); after != before {
		c.Failf("it has overwritten a claim of another attempt")
	}
	if result.GetStatus().GetCode() == ok {
		c.Failf("it was carried out all the same")
	}
	p.None("the replica had to start nothing for it")
}

// checkLate is the operations stream for a create that waits to start, and acknowledges
// so late that it does not count.
func checkLate(c *check) {
	const tooLate = 3 * time.Second / 2 // more than the second for which an acknowledgement counts
	p := c.begin(create)
	restore := c.Stream.Refuse()
	stop := p.AcknowledgeLate(tooLate)
	result := p.finish()
	stop()
	restore()
	if result.GetStatus().GetCode() != ok {
		p.None("the replica had to start nothing for a create whose claim was not acknowledged in time")
	} else if !c.Poll(c.Patience, func() bool { return len(p.Claims(driverv1.Claim_STATE_BEGUN)) >= 2 }) {
		c.Failf("a create started although its claim was acknowledged only %s after it was written", tooLate)
	}
}

func checkFencedCall(c *check) {
	p := c.atCloud(c.Timeout)
	p.Usurp()
	c.Step("a create that was at the cloud when another attempt took its claim's place", func() { p.One(c.Created(p.finish())) })
	c.Step("a create that was at the cloud when another attempt took its claim's place, and that was asked for again", func() { overtaken(c) })
}

// overtaken asks again for a create that is at the cloud, and has another replica's attempt take its claim's place before it
// ends: the stream refuses its outcome, so no manager may hear of that.
func overtaken(c *check) {
	p := c.atCloud(c.Timeout)
	x := p.askAgain(recovering)
	x.NeedsNone() // it needs no result
	p.Usurp()
	p.release()
	uncounted := func(result *driverv1.Result) { // a result that another attempt's may contradict
		if result != nil && !result.GetOutcomeUnknown() {
			c.Failf("it was answered %s, although another attempt has its claim's place", bench.Said(result))
		}
	}
	c.Eventually("the replica forgets an operation whose claim another attempt has replaced", func() bool {
		held := p.Held()
		uncounted(held.GetResult())
		for x.Waiting() > 0 {
			f, _ := x.Next(c.Patience)
			uncounted(f.GetResult())
		}

		return len(held.GetOperations()) == 0
	})
}
