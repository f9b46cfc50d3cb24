package drivertest

import (
	"errors"
	"time"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
)

// witnessClauses are held against everything that was seen meanwhile.
var witnessClauses = []Clause{
	{ID: "HELLO-1", Says: "sends a session at once when it hears of a new mcm", binds: full, check: checkHello},
	{ID: "ENV-5", Says: "frames carry operation id and attempt", check: witnessed("ENV-5")},
	{ID: "ENV-7", Says: "everything it sends carries the replica", binds: full, check: witnessed("ENV-7")},
	{ID: "INSTANCE-1", Says: "instances have a provider id", check: witnessed("INSTANCE-1")},
	{ID: "INSTANCE-2", Says: "listed instances have a machine name", check: witnessed("INSTANCE-2")},
	{ID: "MACHINE-2", Says: "last_known_state holds no secret", check: witnessed("MACHINE-2")},
	{ID: "PROGRESS-1", Says: "progress holds no secret", check: witnessed("PROGRESS-1")},
	{ID: "STATUSTEXT-1", Says: "texts of errors hold no secret", check: checkTexts},
	{ID: "FETCH-1", Says: "asks to be answered below its own inbox prefix", check: checkInbox},
	{ID: "RESULT-1", Says: "exactly one result for each accepted request", check: checkResults},
}

var sessionClauses = []Clause{
	{ID: "SESSION-1", Says: "sends sessions all the time, also while it drains and when it stops", binds: full, check: checkSessions},
	{ID: "SESSION-2", Says: "replica ids are unique, and new with each process", binds: full, check: checkReplicaIDs},
}

func witnessed(clause string) func(*check) { return func(c *check) { c.Witnessed(clause) } }

// checkHello compares how soon a session follows on the hello of a new mcm with how
// soon it would come anyway.
func checkHello(c *check) {
	const sure, most = 3, 15 // a late session makes the next one seem early, and a slow machine makes any late
	balance := 0
	for n := 0; n < most && balance > -sure; n++ {
		c.AwaitSession(c.Session().GetSequence())
		last, said := c.Session().GetSequence(), time.Now()
		c.Hello(nil)
		c.AwaitSession(last)
		if c.Session().At.Sub(said) < bus.SessionInterval/2 {
			balance++
		} else {
			balance--
		}
		if balance == sure {
			return
		}
	}
	c.Failf("the hello of a new mcm is not followed by a session at once")
}

// checkResults lets deadlines pass, and looks whether everything that was accepted got
// its result.
func checkResults(c *check) {
	endsInTime(c, "list", func() {
		r := c.ListRequest()
		within(bench.Silence)(r.Env)
		c.Send(r).ResultWithin(c.atLatest())
	})
	m := c.NewMachine()
	endsInTime(c, "delete", func() {
		o := m.Operation(remove)
		o.Send(within(bench.Silence)).ResultWithin(c.atLatest())
		o.Acknowledge()
	})
	if !c.Poll(c.Patience, func() bool { return len(c.Unfinished()) == 0 }) {
		c.Failf("accepted, and never ended: %s", c.Unfinished())
	}
	c.Witnessed("RESULT-1")
}

const (
	// lateness is how long after its deadline the manager waits for a result.
	lateness = 5 * time.Second
	// stalls is how often a slow machine may make a result late.
	stalls = 2
)

// atLatest is how long after a request for bench.Silence its result has to be there.
func (c *check) atLatest() time.Duration { return bench.Silence + min(lateness, c.Patience) }

// endsInTime holds the class back while a request waits for it, until its time is over.
func endsInTime(c *check, what string, ask func()) {
	var err error
	for range stalls {
		release := c.HoldFetches()
		err = c.Try(func() { c.Step(what+", whose class cannot be had, after its deadline", ask) })
		release()
		if err == nil {
			break
		}
	}
	c.Must(err)
}

func checkSessions(c *check) {
	c.Witnessed("SESSION-1")
	punctual(c)
	if c.Process == nil {
		c.Skipf("they come in time; whether they do while it drains takes a driver that may be stopped and started %s", bench.ByProcess)
	}
	drained(c)
}

// punctual listens for sessions in a row without a gap.
func punctual(c *check) {
	const inARow = 4
	const mostBetween = bus.SessionInterval + bus.SessionInterval/4 // with what a scheduler may add
	var late time.Duration
	for range windows {
		from := c.Session().GetSequence()
		c.Eventually("the replica sends sessions", func() bool { return c.Session().GetSequence() >= from+inARow })
		late = 0
		all := c.SessionsOf(c.Target)
		for n := len(all) - 1; n > 0 && all[n].GetSequence() > from; n-- {
			late = max(late, all[n].At.Sub(all[n-1].At))
		}
		if late <= mostBetween {
			return
		}
	}
	c.Failf("%s passed between two sessions, more than %s", late.Round(time.Millisecond), bus.SessionInterval)
}

// drained stops the replica in the middle of an operation, and starts it again.
func drained(c *check) {
	p := &pending{release: func() {}}
	err := c.Try(func() { p = c.begin(remove) })
	if _, skipped := errors.AsType[bench.SkipError](err); !skipped {
		c.Must(err)
	}
	old := c.Target
	c.Must(c.Process.Stop(c.Context()))
	c.Cleanup(func() {
		p.release()
		c.Must(c.Process.Wait(c.Context()))
		c.Must(c.Process.Start(c.Context()))
		c.AwaitSuccessor(old)
	})
	if err == nil {
		c.Eventually("the replica, asked to stop, says that it drains", func() bool { return c.Session().GetDraining() })
		c.NewMachine().Operation(remove).Send().Want("a new operation of a replica that drains", bench.Busy())
		c.Want(ok, "the operation that ran when the replica was asked to stop", p.finish())
	}
	c.Eventually("the replica, asked to stop, says that it has stopped", func() bool { return c.Session().GetStopped() })
}

func checkReplicaIDs(c *check) {
	if c.Process != nil {
		c.Restart()
	}
	for _, replica := range c.Replicas() {
		all := c.SessionsOf(replica)
		for n := 1; n < len(all); n++ {
			if !all[n].GetStartedAt().AsTime().Equal(all[0].GetStartedAt().AsTime()) {
				c.Failf("two processes call themselves replica %q: their sessions say different started_at", replica)
			}
			if all[n].GetSequence() <= all[n-1].GetSequence() {
				c.Failf("sessions of replica %q are not counted: %d follows %d", replica, all[n].GetSequence(), all[n-1].GetSequence())
			}
		}
	}
	c.Witnessed("SESSION-2")
	if c.Process == nil {
		c.Skipf("they are unique; whether they are new takes a driver that may be stopped and started %s", bench.ByProcess)
	}
}
