package bus

import (
	"context"
	"testing"
	"time"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// Without claims, nothing tells a replica that attempts were made elsewhere since its
// own. It was refused by its cloud and cut off; the next attempt made the instance, and
// its replica is gone. When the first one is back, long after all deadlines, its refusal
// is not what came of the operation.
func TestOldRefusal(t *testing.T) {
	t.Parallel()
	for name, late := range map[string]bool{"kept": false, "of an attempt that runs still": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onBench(t, func(b *bench) {
				b.unclaimed()
				begun, refuse := make(chan struct{}), make(chan struct{})
				made, looked := false, uint32(0)
				first := b.join("first", func(_ context.Context, _ *modelReplica, t *Task) *driverv1.Result {
					if err := t.BeginMutation(); err != nil {
						return failure(CodeOf(err), err.Error())
					}
					if t.Request.GetRecover() && made {
						looked = t.Request.GetAttempt()

						return &driverv1.Result{}
					}
					close(begun)
					<-refuse // whatever its deadline

					return failure(driverv1.Code_CODE_RESOURCE_EXHAUSTED, "no quota")
				})
				req := benchCreate(operationTime)
				type answer struct {
					out *Outcome
					err error
				}
				answers := make(chan answer, 1)
				ask := func() { // until it is known, or nobody is there
					out, err := b.caller.Call(b.ctx, req)
					for OriginOf(err) == OriginTimeout && out.Result != nil {
						req.Recover, req.Attempt, req.Until, req.PlainUntil = true, out.Attempts, out.Until, out.PlainUntil
						b.pass(2 * time.Second)
						out, err = b.caller.Call(b.ctx, req)
					}
					answers <- answer{out, err}
				}
				go ask()
				<-begun
				b.join("second", func(_ context.Context, r *modelReplica, t *Task) *driverv1.Result {
					if err := t.BeginMutation(); err != nil {
						return failure(CodeOf(err), err.Error())
					}
					made = true
					r.port.crash()

					return &driverv1.Result{}
				})
				mend := b.cut(first.port, true, true)
				if !late {
					close(refuse)
				}
				got := <-answers
				if OriginOf(got.err) != OriginTimeout || got.out.Attempts != 2 || !made {
					b.Errorf("after the second replica's death: %v, %+v; want that it is not known", got.err, got.out)
				}
				b.pass(time.Until(got.out.Until) + time.Second)
				mend()
				b.until("the first replica is back", func() bool { return len(b.caller.Replicas()) == 1 })
				req.Recover, req.Attempt, req.Until, req.PlainUntil = true, got.out.Attempts, got.out.Until, got.out.PlainUntil
				go ask()
				b.pass(2 * deathLimit) // it is attached by now
				if late {
					close(refuse)
				}
				got = <-answers
				if got.err != nil || looked != 3 || got.out.Attempts != 3 {
					b.Errorf("when the first one is back: %v, %d attempts, looked in attempt %d; want that a third one looks",
						got.err, got.out.Attempts, looked)
				}
			})
		})
	}
}

// A replica that is asked about a later attempt than the one that it has the failure of
// says that it does not have it, and sticks to that.
func TestOldFailureIsDenied(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		claimed bool
		fenced  bool
		result  *driverv1.Result
		attempt uint32
		held    bool
		reason  string
	}{
		"later attempt": {false, false, failure(driverv1.Code_CODE_RESOURCE_EXHAUSTED, "no quota"), 2, false, "that one may be elsewhere"},
		"same attempt":  {false, false, failure(driverv1.Code_CODE_RESOURCE_EXHAUSTED, "no quota"), 1, true, "it is its result"},
		"people":        {false, false, failure(driverv1.Code_CODE_RESOURCE_EXHAUSTED, "no quota"), 0, true, "they ask for what there is"},
		"success":       {false, false, &driverv1.Result{}, 2, true, "there is the instance"},
		"it runs":       {false, false, nil, 2, true, "two of one machine never run here"},
		"claimed":       {true, false, failure(driverv1.Code_CODE_RESOURCE_EXHAUSTED, "no quota"), 2, true, "the claim tells what counts"},
		"fenced":        {true, true, failure(driverv1.Code_CODE_RESOURCE_EXHAUSTED, "no quota"), 2, true, "mcm goes on from it as if it were not there"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onBench(t, func(b *bench) {
				b.unclaimed()
				r := b.join("replica", refuses)
				id := "uid.create.0"
				h := &held{
					cluster: "default", id: id, attempt: 1, operation: driverv1.Operation_OPERATION_CREATE, machine: "uid",
					started: time.Now(), result: tc.result, ended: time.Now(), claimed: tc.claimed, stored: true, cancel: func() {},
				}
				r.server.mu.Lock()
				r.server.held[h.key()] = h
				r.server.unfenced = !tc.fenced // there is no lease
				r.server.mu.Unlock()
				answer := b.caller.ask(b.ctx, "virtual", "replica", id, tc.attempt)
				if got := len(answer.GetOperations()) == 1; answer == nil || got != tc.held || (answer.GetResult() != nil) != (tc.held && tc.result != nil) {
					b.Errorf("asked about attempt %d: %v, want it to have it: %t: %s", tc.attempt, answer, tc.held, tc.reason)
				}
				r.server.mu.Lock()
				denied := r.server.denials.covers(&held{cluster: "default", id: id, attempt: tc.attempt, started: time.Now()})
				r.server.mu.Unlock()
				if want := !tc.held || tc.fenced; denied != want {
					b.Errorf("denied = %t, want %t: %s", denied, want, tc.reason)
				}
			})
		})
	}
}

// Of several replicas that have an operation, one that runs it comes before one that
// failed, whatever their attempts' numbers.
func TestHolding_Before(t *testing.T) {
	t.Parallel()
	order := []holding{
		{replica: "runs the second", attempt: 2},
		{replica: "runs the first", attempt: 1},
		{replica: "failed the third", attempt: 3, failed: true},
		{replica: "fenced", attempt: 4, fenced: true},
	}
	for i, h := range order {
		for j, other := range order {
			if got := h.before(other); got != (i < j) {
				t.Errorf("%q before %q: %t", h.replica, other.replica, got)
			}
		}
	}
}

// Who looks for an attempt, and finds an earlier one that runs, knows its result by that
// one's number: another may have run since.
func TestFind_EarlierAttempt(t *testing.T) {
	t.Parallel()
	onBench(t, func(b *bench) {
		b.unclaimed()
		begun := make(chan struct{}, 1)
		b.join("replica", hangs(begun))
		b.asks(1, nil)
		<-begun
		req := benchCreate(operationTime)
		k := &call{c: b.caller, req: &req, op: driverv1.Operation_OPERATION_CREATE, number: 3, ran: 3}
		if done, err := k.find(b.ctx); done || err != nil || k.target != "replica" || k.number != 1 || !k.outdated(k.number) {
			b.Errorf("found %q with attempt %d (%t, %v), want the replica with attempt 1, after which others ran", k.target, k.number, done, err)
		}
	})
}
