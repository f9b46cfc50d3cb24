package caller

import (
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestJudgeClaim(t *testing.T) {
	t.Parallel()
	const id = "u.create.2"
	claim := func(id string, state driverv1.Claim_State) *driverv1.Claim {
		return &driverv1.Claim{OperationId: id, State: state, Replica: "r", Attempt: 1}
	}
	const (
		running, begun    = driverv1.Claim_STATE_RUNNING, driverv1.Claim_STATE_BEGUN
		settled, released = driverv1.Claim_STATE_SETTLED, driverv1.Claim_STATE_RELEASED
	)
	plain := claim(id, begun)
	plain.Replica = bus.PlainReplica
	for name, tc := range map[string]struct {
		claim  *driverv1.Claim
		who    replicaStanding
		want   finding
		reason string
	}{
		"none":              {want: isFree, reason: "the machine was never claimed"},
		"own outcome":       {claim: claim(id, settled), want: isOurs, reason: "it ended while no manager was connected"},
		"own, released":     {claim: claim(id, released), want: isFree, reason: "it ended, and is to be recovered"},
		"own, live":         {claim: claim(id, running), who: replicaStanding{live: true}, want: isHeld, reason: "it runs"},
		"own, begun":        {claim: claim(id, begun), who: replicaStanding{live: true}, want: isHeld, reason: "it runs"},
		"own, denied":       {claim: claim(id, running), who: replicaStanding{live: true, denied: true}, want: isFree, reason: "the replica says so"},
		"own, not heard":    {claim: claim(id, begun), who: replicaStanding{unheard: true}, want: isUnheard, reason: "it had no time to be heard"},
		"own, silent":       {claim: claim(id, begun), want: isFree, reason: "replacing the claim stops its replica"},
		"own, plain":        {claim: plain, want: isPlain, reason: "it cannot be asked, and nothing stops it"},
		"own, plain, asked": {claim: plain, who: replicaStanding{denied: true}, want: isFree, reason: "this side has written the claim, and not asked yet"},
		"earlier, plain":    {claim: &driverv1.Claim{OperationId: "u.create.0", State: begun, Replica: bus.PlainReplica}, want: isFree, reason: "it has ended, or there was no later one"},
		"earlier outcome":   {claim: claim("u.create.0", settled), want: isFree, reason: "an old outcome is never replayed"},
		"earlier, live":     {claim: claim("u.create.0", running), who: replicaStanding{live: true}, want: isBusy, reason: "one mutation at a time"},
		"earlier, silent":   {claim: claim("u.create.0", running), want: isFree, reason: "replacing the claim stops its replica"},
		"later":             {claim: claim("u.delete.3", settled), want: isStale, reason: "another manager is ahead"},
		"same number":       {claim: claim("u.delete.2", settled), want: isStale, reason: "another operation has had the number, before a restore"},
		"nonsense, running": {claim: claim("what?", running), want: isFree, reason: "replacing it stops its writer"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := judgeClaim(tc.claim, id, tc.who); got != tc.want {
				t.Errorf("judgeClaim = %d, want %d: %s", got, tc.want, tc.reason)
			}
		})
	}
}

// That a replica has ended an operation says nothing of the next one that it has
// accepted.
func TestAnEndedOperationSaysNothingOfTheNext(t *testing.T) {
	t.Parallel()
	c := &Caller{replicas: newReplicas()}
	c.since.Store(&time.Time{})
	c.replicas.onSession(session("r", 1), time.Now())
	k := claimReader{call: &call{c: c, req: &Request{Provider: "p", OperationID: "u.delete.2"}}}
	claim := func(id string) *driverv1.Claim {
		return &driverv1.Claim{OperationId: id, Attempt: 1, Replica: "r", State: driverv1.Claim_STATE_RUNNING}
	}
	earlier, own := claim("u.initialize.1"), claim(k.req.OperationID)
	if got := judgeClaim(earlier, k.req.OperationID, k.standing(earlier, 1)); got != isBusy {
		t.Fatalf("the earlier operation's claim is %v, want %v", got, isBusy)
	}
	k.endedOperation = earlier.GetOperationId()
	if got := judgeClaim(earlier, k.req.OperationID, k.standing(earlier, 1)); got != isFree {
		t.Errorf("the earlier operation's claim is %v once that has ended, want %v", got, isFree)
	}
	if got := judgeClaim(own, k.req.OperationID, k.standing(own, 1)); got != isHeld {
		t.Errorf("the claim of this operation is %v, want %v: it runs there", got, isHeld)
	}
}

func FuzzJudgeClaim(f *testing.F) {
	f.Add([]byte{}, "u.create.0")
	f.Fuzz(func(_ *testing.T, record []byte, id string) {
		c := &driverv1.Claim{}
		if proto.Unmarshal(record, c) == nil {
			judgeClaim(c, id, replicaStanding{})
		}
	})
}
