package caller

import (
	"context"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/opstream"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A replica is asked again for what it runs: the
// asker before may have given that up, and sent another attempt to its claim's place.
// What comes of it counts once it is stored, and not at all where the other one was
// first.
func TestResultAskedForAgainCountsOnceStored(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]askedAgainCase{
		"for a later attempt":                                   {later: true},
		"for a later attempt, and overtaken":                    {later: true, overtaken: true},
		"for this attempt":                                      {},
		"for this attempt, and overtaken":                       {overtaken: true},
		"for a later attempt, when it has ended, and overtaken": {later: true, ended: true, overtaken: true},
		"for this attempt, when it has ended, and overtaken":    {ended: true, overtaken: true},
		"for this attempt, when it has ended":                   {ended: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onBench(t, func(b *bench) { b.resultAskedForAgain(tc) })
		})
	}
}

// An askedAgainCase says by which attempt, and when, one is asked for again, and
// whether another one takes its claim's place.
type askedAgainCase struct{ later, ended, overtaken bool }

// holds has a replica take a create, which runs until end.
func (b *bench) holds() (r *modelReplica, end chan struct{}, claim uint64) {
	b.Helper()
	end = make(chan struct{})
	b.caller.streams.of("virtual")
	r = b.join("replica", func(_ context.Context, _ *modelReplica, _ *replica.Task) *driverv1.Result {
		<-end

		return &driverv1.Result{}
	})
	first := b.asks(1, new(uint64))
	b.until("it is accepted", func() bool { return first.snapshot().holder != "" })

	return r, end, b.claim().Sequence
}

func (b *bench) resultAskedForAgain(tc askedAgainCase) {
	b.Helper()
	r, end, sequence := b.holds()
	attempt, replaces := uint32(1), (*uint64)(nil)
	if tc.later {
		attempt, replaces = 2, &sequence
	}
	b.silence(true) // so the outcome waits to be stored
	if tc.ended {
		close(end)
		b.until("it has ended", func() bool { return r.server.Running() == 0 })
	}
	again := b.asks(attempt, replaces)
	b.until("it is attached to", func() bool { return again.snapshot().holder != "" })
	if !tc.ended {
		close(end)
		b.until("it has ended", func() bool { return r.server.Running() == 0 })
	}
	b.pass(100 * time.Millisecond)
	answer := b.caller.ask(b.ctx, "virtual", "replica", "uid.create.0", attempt)
	if again.snapshot().result != nil || answer.GetResult() != nil || len(answer.GetOperations()) != 1 {
		b.Errorf("while another attempt can take its claim's place: %v, and %v; want no result", again.snapshot(), answer)
	}
	b.silence(false)
	if tc.overtaken {
		other := &driverv1.Envelope{Body: &driverv1.Envelope_Claim{Claim: &driverv1.Claim{
			OperationId: "uid.create.0", Attempt: 3, Replica: "other", State: driverv1.Claim_STATE_RUNNING,
		}}}
		if _, err := b.caller.ledger("virtual").Put(b.ctx, b.claimSubject(), other, sequence, 0); err != nil {
			b.Fatal(err)
		}
	}
	b.pass(2 * 2 * bus.SessionInterval)
	answer = b.caller.ask(b.ctx, "virtual", "replica", "uid.create.0", attempt)
	state := b.claim().Envelope.GetClaim().GetState()
	if tc.overtaken && (again.snapshot().result != nil || len(answer.GetOperations()) != 0 || state != driverv1.Claim_STATE_RUNNING) {
		b.Errorf("after another attempt has taken its claim's place: %v, %v, and %v; want that it does not have it", again.snapshot(), answer, state)
	}
	if !tc.overtaken && (again.snapshot().result == nil || answer.GetResult() == nil || state != driverv1.Claim_STATE_SETTLED) {
		b.Errorf("when it is stored: %v, %v, and %v; want its result", again.snapshot(), answer, state)
	}
}

// asks sends the replica a request for a create.
func (b *bench) asks(number uint32, replaces *uint64) *attempt {
	b.Helper()
	req := benchCreate(time.Minute)
	k := &call{c: b.caller, req: &req, op: driverv1.Operation_OPERATION_CREATE, number: number, recover: number > 1, replaces: replaces}
	a := newAttempt(req.OperationID, number, bus.TreeReplica, "replica")
	if _, err := k.send(a); err != nil {
		b.Fatal(err)
	}

	return a
}

// silence has JetStream not answer, or answer again.
func (b *bench) silence(on bool) {
	b.network.mu.Lock()
	defer b.network.mu.Unlock()
	b.network.server.away = on
}

func (b *bench) claimSubject() string {
	b.Helper()
	subject, err := opstream.ClaimSubject("default", "virtual", "uid")
	if err != nil {
		b.Fatal(err)
	}

	return subject
}

func (b *bench) claim() *opstream.Record {
	b.Helper()
	found, err := b.caller.ledger("virtual").Last(b.ctx, b.claimSubject())
	if err != nil || found == nil {
		b.Fatalf("no claim: %v", err)
	}

	return found
}
