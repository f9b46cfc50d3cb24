package drivertest

import (
	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// checkOutcomeStored ends attempts in every way there is, and looks at what is in the
// place of their claims: the next manager knows no more of them.
func checkOutcomeStored(c *check) {
	ends := func(op driverv1.Operation, changes ...bench.Change) *driverv1.Result {
		o := c.NewMachine().Operation(op)
		result := o.Run(changes...)
		c.endStored(o, result)

		return result
	}
	c.Step("a create", func() {
		if result := ends(create); !result.GetOutcomeUnknown() { // the stream may not have answered in time
			c.Created(result)
		}
	})
	c.Step("an operation that failed", func() { c.Fetches.With(noClass, func() { ends(remove) }) })
	c.Step("a create of unknown outcome", func() { c.Fetches.With(noClass, func() { ends(create, recovering) }) })
	c.Step("an operation whose claim is another replica's by now", func() { sparesOthers(c) })
	c.Step("an operation whose outcome was not stored at once", func() { storesLater(c) })
	c.Witnessed("CLAIM-5")
}

// fail lets a pending operation go on without a class to be had, and waits until its outcome is sent to the stream.
func (c *check) fail(p *pending) (result *driverv1.Result) {
	c.Fetches.With(noClass, func() { result = p.finish() })
	c.Eventually("the replica tries to store the outcome of operation "+p.ID, func() bool { return len(p.Claims(endOf(result))) > 0 })

	return result
}

// sparesOthers puts another replica's claim in the place of that of a running
// operation.
func sparesOthers(c *check) {
	p := c.begin(remove)
	sequence := p.Usurp()
	c.fail(p)
	_, env := p.Claim()
	if !p.Replace(env, sequence) { // the stream takes this after what the replica has sent
		c.Failf("the outcome was put in the place of another replica's claim")
	}
}

// storesLater keeps the stream from taking the outcome of an operation until its
// result was acknowledged.
func storesLater(c *check) {
	p := c.begin(remove)
	restore := c.Stream.Refuse()
	result := c.fail(p)
	c.Ops("", 0) // behind the acknowledgement
	restore()
	c.endStored(p.Operation, result)
}

// endOf is the state of a claim whose attempt ended with a result.
func endOf(result *driverv1.Result) driverv1.Claim_State {
	if result.GetOutcomeUnknown() {
		return driverv1.Claim_STATE_RELEASED
	}

	return driverv1.Claim_STATE_SETTLED
}

// endStored waits until the claim of an operation says how it ended, and holds that
// against its result.
func (c *check) endStored(o *bench.Operation, result *driverv1.Result) {
	claim := o.Ended()
	if want := endOf(result); claim.GetState() != want {
		c.Failf("the result was %s, and the claim says %s, not %s", bench.Said(result), claim.GetState(), want)
	}
	have, want := proto.CloneOf(claim.GetOutcome()), outcomeOf(result)
	if have != nil {
		have.Sealed = nil
	}
	if !proto.Equal(have, want) {
		c.Failf("the stored outcome is {%v}, and after the result it is to be {%v}", have, want)
	}
	c.Leak("CLAIM-5", "a stored outcome", claim.GetOutcome().String())
	if sealed := claim.GetOutcome().GetSealed(); sealed != nil {
		o.Opens(sealed, result)
	}
}

// outcomeOf is what is to be stored of a result in clear; nil for an unknown outcome.
func outcomeOf(r *driverv1.Result) *driverv1.Outcome {
	if r.GetOutcomeUnknown() {
		return nil
	}
	instance := r.GetCreate().GetInstance()
	if instance == nil {
		instance = r.GetInitialize().GetInstance()
	}

	return &driverv1.Outcome{
		Code: r.GetStatus().GetCode(), RetryAfter: r.GetStatus().GetRetryAfter(),
		ProviderId: instance.GetProviderId(), NodeName: instance.GetNodeName(), Addresses: instance.GetAddresses(),
	}
}

func checkUnknownNotKept(c *check) {
	o := c.NewMachine().Operation(create)
	var result *driverv1.Result
	c.Fetches.With(noClass, func() { result = o.Result(recovering) })
	if !result.GetOutcomeUnknown() { // which breaks RESULT-3, or it needs no class
		c.Skipf("no operation ended with an unknown outcome: a create with recover that got no class was answered %s", bench.Said(result))
	}
	if len(o.Held().GetOperations()) > 0 {
		c.Failf("ops still lists an operation that ended with an unknown outcome")
	}
	c.endStored(o, result) // that would be keeping it as well
	c.Witnessed("CLAIM-5")
}
