package drivertest

import (
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

var attemptClauses = []Clause{
	{ID: "RUN-1", Says: "one mutation of a machine at a time", binds: full, check: checkOneAtATime},
	{ID: "RUN-2", Says: "what runs already is not run again; its frames go to who asked last", binds: full, check: checkAttach},
	{ID: "RESULT-2", Says: "keeps a mutation's result until it is acknowledged", binds: full, check: checkKept},
	{ID: "ACCEPT-1", Says: "says at once that it has a mutation", binds: full, check: checkAccepts},
	{ID: "ACCEPT-2", Says: "says so of a read that takes its time", binds: full, check: checkAcceptsSlowRead},
	{ID: "BUSY-1", Says: "queues nothing that it has no slot for", binds: full, check: checkSlots},
	{ID: "CANCEL-1", Says: "a cancelled operation still gets its result", binds: full, check: checkCancel},
	{ID: "OPS-1", Says: "does not take an attempt later that it said it does not hold, or that it is fenced", binds: full, check: checkDenial},
}

func checkOneAtATime(c *check) {
	p := c.begin(create)
	p.Machine.Operation(remove).Send().Want("a delete, while a create of the machine runs,", bench.Busy(driverv1.BusyReason_BUSY_REASON_MACHINE))
	p.finish()
}

func checkAccepts(c *check) {
	c.begin(remove).finish()
	c.Witnessed("ACCEPT-1")
}

func checkAcceptsSlowRead(c *check) {
	release := c.HoldFetches()
	x := c.Send(c.ListRequest())
	f := x.Answer()
	if f.GetResult() != nil && f.GetResult().GetStatus().GetCode() == ok {
		c.Skipf("the driver answers without the class, by which the suite could hold it up")
	}
	if f.GetAccepted() == nil {
		c.Failf("a read that takes its time was answered %s", f)
	}
	release()
	x.Result()
}

// slotsFilled is how many slots the suite is ready to fill.
const slotsFilled = 128

func checkSlots(c *check) {
	slots := int(c.Session().GetSlots())
	if slots == 0 || slots > slotsFilled {
		c.Skipf("the replica has %d slots, and the suite fills 1 to %d", slots, slotsFilled)
	}
	first := c.begin(remove)
	taken := []*pending{first}
	for range slots { // one more than there is room for
		p := &pending{Operation: c.NewMachine().Operation(remove), release: first.release}
		p.x = p.Send()
		if p.x.Answer().GetBusy() != nil {
			break
		}
		taken = append(taken, p)
	}
	for _, p := range taken {
		p.finish()
	}
	if len(taken) > slots {
		c.Failf("%d operations were accepted by a replica of %d slots", len(taken), slots)
	}
}

func checkCancel(c *check) {
	p := c.begin(create)
	p.Cancel()
	timer := time.AfterFunc(bench.Silence, p.release) // a driver may not end its wait for the class
	defer timer.Stop()
	result := p.x.Result()
	p.Acknowledge()
	if result.GetStatus().GetCode() != ok && !result.GetOutcomeUnknown() {
		p.None("the create was cancelled before anything started")
	}
}

// checkKept asks for results again that were not acknowledged.
func checkKept(c *check) {
	const aWhile = 2 * time.Second // a day would take too long
	created := c.once(create)
	providerID := c.Created(created.result)
	all := []*done{created, c.onceInVain(create), c.once(remove)}
	c.Pause(aWhile) // for results that must not be forgotten
	for _, d := range all {
		c.Step("a result that was not acknowledged", func() {
			listedSettled(c, d)
			c.repeated(d)
		})
	}
	for _, d := range all {
		d.Acknowledge()
	}
	created.One(providerID)
}

// listedSettled looks for a settled operation where the manager looks for it.
func listedSettled(c *check, d *done) {
	held := d.Held()
	switch {
	case len(held.GetOperations()) == 0:
		c.Failf("ops does not list its operation")
	case held.GetResult() == nil:
		c.Failf("ops for the one operation comes without it")
	case !proto.Equal(held.GetResult(), d.result):
		c.Failf("ops returned %s after %s", bench.Said(held.GetResult()), bench.Said(d.result))
	}
	c.Eventually("sessions list its operation as settled", func() bool {
		now := c.Session()

		return now.GetOmitted() > 0 || listedAs(now, d.ID, (*driverv1.OperationState).GetSettled)
	})
}

// denialKept is how long a replica has to remember what it said that it does not hold.
const denialKept = 4 * time.Second

// checkDenial asks for attempts that the replica has said it does not hold, at once and
// towards the end of the time for which that counts.
func checkDenial(c *check) {
	for range windows {
		o := c.NewMachine().Operation(remove)
		asked := time.Now()
		if held := c.Ops(o.ID, 2); len(held.GetOperations()) > 0 {
			c.Failf("ops lists an operation that was never asked for")
		}
		unclear := takes(c, o, 2, asked)
		c.Pause(time.Until(asked.Add(denialKept * 3 / 4)))
		if !unclear && !takes(c, o, 1, asked) { // an earlier attempt is denied along with it
			deniesFenced(c)

			return
		}
	}
	c.Skipf("%s pass here between a question and a request: nothing is denied then", denialKept)
}

// takes asks for an attempt that was denied. Unclear is true when the denial did not count
// any more by the time of the answer.
func takes(c *check, o *bench.Operation, attempt uint32, denied time.Time) (unclear bool) {
	f, came := o.Send(func(env *driverv1.Envelope) { env.Attempt = attempt }).First(c.Patience)
	if !came || f.GetBusy() != nil {
		return false
	}
	if passed := time.Since(denied); passed <= denialKept {
		c.Failf("it said that it does not hold the attempt, and %s later it answered attempt %d %s", passed.Round(time.Millisecond), attempt, f)
	}

	return true
}

// deniesFenced asks for an attempt that the replica does not hold, as it lists the
// operation as fenced, and whose claim another replica has since.
func deniesFenced(c *check) {
	for range windows {
		if !takesFenced(c, c.begin(remove)) {
			return
		}
	} // it has denied what it does not list at all
}

func takesFenced(c *check, p *pending) (unclear bool) {
	p.Usurp()
	c.Fetches.With(noClass, func() {
		p.release()
		p.x.Result() // known: nothing was started
	})
	later := p.x.Attempt + 1
	var asked time.Time
	denied := c.Poll(c.Patience, func() bool {
		asked = time.Now()

		return !slices.ContainsFunc(c.Ops(p.ID, later).GetOperations(), func(o *driverv1.OperationState) bool { return !o.GetFenced() })
	})

	return denied && takes(c, p.Operation, later, asked) // else it is as good as held, and no manager goes on from it
}
