package replica

import (
	"log/slog"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/opstream"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// What fails is known only if no other attempt of a create may be at work: also where
// that is said of one which began as the first.
func TestDoubt(t *testing.T) {
	t.Parallel()
	const create, remove = driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_DELETE
	for name, tc := range map[string]struct {
		kind             driverv1.Operation
		op               *operation
		recover, unknown bool
	}{
		"the only attempt":                     {create, &operation{callBegun: true}, false, false},
		"it was to recover, and looked":        {create, &operation{callBegun: true}, true, false},
		"it was to recover, and did not look":  {create, &operation{}, true, true},
		"another may run":                      {create, &operation{callBegun: true, earlierMayRun: true}, true, true},
		"another may run, of which it hears":   {create, &operation{callBegun: true, earlierMayRun: true}, false, true},
		"another may run, and it began no way": {create, &operation{earlierMayRun: true}, false, true},
		"another delete may run":               {remove, &operation{callBegun: true, earlierMayRun: true}, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tc.op.operation, tc.op.request = tc.kind, &driverv1.Envelope{Recover: tc.recover}
			got := bus.Failure(driverv1.Code_CODE_RESOURCE_EXHAUSTED, "no quota")
			tc.op.judgeFailure(got, false)
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
		request *operation
		result  *driverv1.Result
		want    bool
		reason  string
	}{
		"an attempt in between may run": {&operation{attempt: 3, earlierMayRun: true}, refused, true, "the refusal is older"},
		"none does, by the claim":       {&operation{attempt: 3, claim: 7}, refused, false, "the refusal is the outcome"},
		"none did, by the first claim":  {&operation{attempt: 3, claim: 5}, refused, false, "that was this replica's, too"},
		"one may have run":              {&operation{attempt: 3, claim: 9}, refused, true, "the refusal is older, and there may be an instance"},
		"one had run before":            {&operation{attempt: 3, claim: 4}, refused, true, "it is not this replica's claim"},
		"the same attempt":              {&operation{attempt: 1, earlierMayRun: true}, refused, false, "it is asked about this very one"},
		"the same, nothing in between":  {&operation{attempt: 1}, refused, false, "it is asked about this very one"},
		"it was made":                   {&operation{attempt: 3, earlierMayRun: true}, &driverv1.Result{}, false, "there is the instance"},
		"it runs":                       {&operation{attempt: 3, earlierMayRun: true}, nil, false, "two of one machine never run here"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tc.request.request = &driverv1.Envelope{ClaimTerms: &driverv1.ClaimTerms{}}
			if tc.request.claim != 0 {
				tc.request.request.ClaimTerms.Sequence = &tc.request.claim
			}
			has := &operation{attempt: 1, firstClaim: 5, claim: 7, result: tc.result}
			if got := has.isOutdatedBy(tc.request); got != tc.want {
				t.Errorf("outdated = %t, want %t: %s", got, tc.want, tc.reason)
			}
		})
	}
}

// The stream may answer an outcome before its result is sent. A refusal then keeps the
// result back from a caller that has asked again: another attempt may contradict it.
func TestResultCounts(t *testing.T) {
	t.Parallel()
	const (
		stored    = `{"stream":"S","seq":9}`
		refused   = `{"error":{"err_code":10071,"description":"wrong last sequence: 12"}}`
		notStored = `{"error":{"err_code":10008,"description":"JetStream system temporarily unavailable"}}`
	)
	for name, tc := range map[string]struct {
		askedAgain bool
		answer     string
		result     *driverv1.Result
		want       bool
	}{
		"asked for once, and refused":     {false, refused, &driverv1.Result{}, true},
		"asked again, and stored":         {true, stored, &driverv1.Result{}, true},
		"asked again, and not stored yet": {true, notStored, &driverv1.Result{}, false},
		"asked again, and refused":        {true, refused, &driverv1.Result{}, false},
		"it claims to know nothing":       {true, refused, &driverv1.Result{OutcomeUnknown: true}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			op := &operation{cluster: "default", id: "u.create.2", claim: 7, askedAgain: tc.askedAgain, result: tc.result}
			ops, p := newOperations(1, slog.New(slog.DiscardHandler)), part{log: slog.New(slog.DiscardHandler)}
			ops.byID[op.key()] = op
			cs := &claims{part: p, ops: ops}
			seq, err := opstream.SequenceOf(&nats.Msg{Data: []byte(tc.answer)})
			_, final := opstream.ConflictOf(err)
			cs.noteOutcome(op, op.claim, seq, final, err)
			if got := op.resultCounts(); got != tc.want {
				t.Errorf("the result counts: %t, want %t", got, tc.want)
			}
		})
	}
}
