package replica

import (
	"testing"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// What fails is known only if no other attempt of a create may be at work: also where
// that is said of one which began as the first.
func TestDoubt(t *testing.T) {
	t.Parallel()
	const create, remove = driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_DELETE
	for name, tc := range map[string]struct {
		operation driverv1.Operation
		*held
		recover, unknown bool
	}{
		"the only attempt":                     {create, &held{begun: true}, false, false},
		"it was to recover, and looked":        {create, &held{begun: true}, true, false},
		"it was to recover, and did not look":  {create, &held{}, true, true},
		"another may run":                      {create, &held{begun: true, earlierMayRun: true}, true, true},
		"another may run, of which it hears":   {create, &held{begun: true, earlierMayRun: true}, false, true},
		"another may run, and it began no way": {create, &held{earlierMayRun: true}, false, true},
		"another delete may run":               {remove, &held{begun: true, earlierMayRun: true}, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tc.held.operation, tc.request = tc.operation, &driverv1.Envelope{Recover: tc.recover}
			got := bus.Failure(driverv1.Code_CODE_RESOURCE_EXHAUSTED, "no quota")
			tc.doubt(got, false)
			if got.GetOutcomeUnknown() != tc.unknown || got.GetNoEffect() != tc.unknown {
				t.Errorf("outcome_unknown %t, no_effect %t; want both %t", got.GetOutcomeUnknown(), got.GetNoEffect(), tc.unknown)
			}
		})
	}
}

// A replica that has kept the refusal of an earlier attempt does not answer with it
// who asks about a later one, unless by the claim there was none in between.
func TestOutdated_Refusal(t *testing.T) {
	t.Parallel()
	refused := bus.Failure(driverv1.Code_CODE_RESOURCE_EXHAUSTED, "no quota")
	for name, tc := range map[string]struct {
		request *held
		result  *driverv1.Result
		want    bool
		reason  string
	}{
		"an attempt in between may run": {&held{attempt: 3, earlierMayRun: true}, refused, true, "the refusal is older"},
		"none does, by the claim":       {&held{attempt: 3, claim: 7}, refused, false, "the refusal is the outcome"},
		"none did, by the first claim":  {&held{attempt: 3, claim: 5}, refused, false, "that was this replica's, too"},
		"one may have run":              {&held{attempt: 3, claim: 9}, refused, true, "the refusal is older, and there may be an instance"},
		"one had run before":            {&held{attempt: 3, claim: 4}, refused, true, "it is not this replica's claim"},
		"the same attempt":              {&held{attempt: 1, earlierMayRun: true}, refused, false, "it is asked about this very one"},
		"the same, nothing in between":  {&held{attempt: 1}, refused, false, "it is asked about this very one"},
		"it was made":                   {&held{attempt: 3, earlierMayRun: true}, &driverv1.Result{}, false, "there is the instance"},
		"it runs":                       {&held{attempt: 3, earlierMayRun: true}, nil, false, "two of one machine never run here"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tc.request.request = &driverv1.Envelope{ClaimTerms: &driverv1.ClaimTerms{}}
			if tc.request.claim != 0 {
				tc.request.request.ClaimTerms.Sequence = &tc.request.claim
			}
			has := &held{attempt: 1, firstClaim: 5, claim: 7, result: tc.result}
			if got := has.outdated(tc.request); got != tc.want {
				t.Errorf("outdated = %t, want %t: %s", got, tc.want, tc.reason)
			}
		})
	}
}
