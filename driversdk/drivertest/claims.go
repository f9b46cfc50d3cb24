package drivertest

import (
	"strconv"

	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

var claimClauses = []Clause{
	{ID: "CLAIM-1", Says: "claims before it accepts", binds: full, check: checkClaims},
	{ID: "CLAIM-2", Says: "expects the sequence that the request names", binds: full, check: checkTerms},
	{ID: "CLAIM-3", Says: "is busy when the claim is refused", binds: full, check: checkRefusedClaim},
	{ID: "CLAIM-4", Says: "calls no cloud without a claim", binds: full, check: refused("a create that cannot be claimed", unfit, bench.Busy())},
	{ID: "CLAIM-5", Says: "puts the outcome in the place of its own claim only", binds: full, check: checkOutcomeStored},
	{ID: "CLAIM-6", Says: "refuses a mutation without terms for its claim", binds: full, check: refused("a create without claim_terms", terms(nil), bench.Code(driverv1.Code_CODE_INVALID_ARGUMENT))},
}

// checkClaims holds the claim of an operation that runs against its request.
func checkClaims(c *check) {
	p := c.begin(remove)
	_, env := p.Claim()
	p.finish()
	claim := env.GetClaim()
	want := &driverv1.Claim{
		OperationId: p.ID, Attempt: p.x.Attempt, Operation: remove, Namespace: p.GetNamespace(), Name: p.GetName(),
		Provider: c.Provider, Replica: c.Target, Epoch: c.Epoch, State: driverv1.Claim_STATE_RUNNING,
		ClaimedAt: claim.GetClaimedAt(), // any time will do
	}
	if !proto.Equal(claim, want) {
		c.Failf("operation %s was accepted, and the claim on its machine is {%v}, not {%v}", p.ID, claim, want)
	}
}

func checkTerms(c *check) {
	m := c.NewMachine()
	for range 1 + c.Repeat { // the first replaces nothing, each other one its predecessor's outcome
		o := m.Operation(remove)
		var terms string
		result := o.Run(func(env *driverv1.Envelope) { terms = strconv.FormatUint(env.GetClaimTerms().GetSequence(), 10) })
		var found []bench.Claimed
		c.Eventually("operation "+o.ID+" is claimed", func() bool {
			found = o.Claims(driverv1.Claim_STATE_RUNNING)

			return len(found) > 0
		})
		last := found[len(found)-1]
		if last.Expected != terms {
			c.Failf("the request allows to replace sequence %s, and the claim expected %q", terms, last.Expected)
		}
		c.endStored(o, result)
	}
}

// terms sets those of a request's claim.
func terms(t *driverv1.ClaimTerms) bench.Change {
	return func(env *driverv1.Envelope) { env.ClaimTerms = t }
}

var (
	// unfit are terms that no claim in the stream fits: streams begin far above it.
	unfit = terms(&driverv1.ClaimTerms{Sequence: proto.Uint64(1)})
	// fresh are those for a machine without a claim.
	fresh = terms(&driverv1.ClaimTerms{Sequence: proto.Uint64(0)})
	// unset leaves the sequence unset.
	unset = terms(&driverv1.ClaimTerms{})
)

func checkRefusedClaim(c *check) {
	refused := func(what string, terms bench.Change, reason driverv1.BusyReason) {
		c.NewMachine().Operation(remove).Send(terms).Want(what, bench.Busy(reason))
	}
	refused("a request whose terms do not hold", unfit, driverv1.BusyReason_BUSY_REASON_CLAIM)
	refused("a request without a sequence in its terms, for an operation that it does not have,", unset, driverv1.BusyReason_BUSY_REASON_CLAIM)
	defer c.Stream.Refuse()()
	refused("a delete, while the operations stream takes no claims,", fresh, driverv1.BusyReason_BUSY_REASON_STORE)
}
