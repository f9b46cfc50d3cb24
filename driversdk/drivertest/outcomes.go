package drivertest

import (
	"time"

	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

var outcomeClauses = []Clause{
	{ID: "RESULT-3", Says: "says when it does not know the outcome", check: checkOutcomeUnknown},
	{ID: "RESULT-5", Says: "does not know it while an earlier create may run", binds: full, check: checkDoubted},
	{ID: "RESULT-6", Says: "says when that is all that it does not know", binds: full, check: checkNoEffect},
}

// doubting makes a request one for another attempt, while the call of an earlier one
// may still run.
func doubting(env *driverv1.Envelope) { env.Recover, env.EarlierMayRun, env.Attempt = true, true, 2 }

// mustDoubt fails if a result says that its outcome is known.
func (c *check) mustDoubt(result *driverv1.Result) {
	if !result.GetOutcomeUnknown() {
		c.Failf("it was answered %s, not that the outcome is unknown", bench.Said(result))
	}
}

func checkOutcomeUnknown(c *check) {
	unlooked(c)
	keptFromStarting(c, c.mustDoubt)
	p := c.atCloud(time.Second)
	result := p.x.ResultWithin(p.timeout + c.Patience)
	if !result.GetOutcomeUnknown() {
		p.Acknowledge()
		c.Failf("the deadline passed during the cloud call, and the result is %s, not an unknown outcome", bench.Said(result))
	}
}

// unlooked has a create with recover fail before it can look for what an earlier attempt has made.
func unlooked(c *check) {
	fetched := c.Fetches.Count(bench.FetchClass)
	var result *driverv1.Result
	c.Fetches.With(noClass, func() { result = c.NewMachine().Do(create, recovering) })
	if c.Fetches.Count(bench.FetchClass) == fetched || result.GetStatus().GetCode() == ok {
		return // it needs no class
	}
	c.Step("a create with recover got no class, and could not look for what an earlier attempt has made", func() { c.mustDoubt(result) })
}

// keptFromStarting has a create fail that its replica must not start any more, as another attempt has its claim's place.
func keptFromStarting(c *check, judge func(*driverv1.Result)) {
	if c.Plain { // which claims nothing
		return
	}
	p := c.begin(create)
	p.Usurp()
	if result := p.finish(); result.GetStatus().GetCode() != ok { // which breaks FENCE-1
		c.Step("create whose claim another attempt replaced before it started", func() { judge(result) })
	}
}

// doubted has creates fail that are asked for while the call of an earlier attempt may
// still run: one that finds no class, and one whose name is taken where the cloud minds.
func doubted(c *check, judge func(*driverv1.Result)) {
	try := func(m *bench.Machine) {
		if result := m.Do(create, doubting); result.GetStatus().GetCode() != ok {
			judge(result)
		}
	}
	c.Step("create while an earlier attempt may run, and no class to be had", func() {
		c.Fetches.With(noClass, func() { try(c.NewMachine()) })
	})
	m := c.first()
	c.Step("create of a name that is taken, while an earlier attempt may run", func() { try(m.Namesake()) })
}

func checkDoubted(c *check) {
	doubted(c, c.mustDoubt)
	c.Step("create that ran already when it was asked for while an earlier attempt may run", func() { doubtedLater(c) })
}

// doubtedLater has a create fail, for its name is taken, that is asked for again while
// it runs: only the second request says that the call of an earlier attempt may run.
func doubtedLater(c *check) {
	p := c.beginFor(c.first().Namesake(), create)
	x := p.askAgain(doubting)
	p.release()
	result := x.Result()
	p.Acknowledge()
	if result.GetStatus().GetCode() != ok { // else the cloud does not mind
		c.mustDoubt(result)
	}
}

func checkNoEffect(c *check) {
	judge := func(result *driverv1.Result) {
		if result.GetOutcomeUnknown() && !result.GetNoEffect() {
			c.Failf("it was answered %s, without no_effect", bench.Said(result))
		}
	}
	doubted(c, judge)
	keptFromStarting(c, judge)
}
