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

// freezeFor has a process stand still for some time. The network's mu is held.
func (b *bench) freezeFor(p *port, d time.Duration) {
	p.frozen = make(chan struct{})
	b.network.after(time.Now().Add(d), func() {
		close(p.frozen)
		p.frozen = nil
	})
}

// claimsOf calls f, with the network's mu held, for each claim of a replica that the
// operations stream takes.
func (b *bench) claimsOf(replicaID string, f func(*driverv1.Claim)) {
	b.network.server.onPut = func(_ string, _, after []byte) {
		if env, err := bus.Decode(after, ""); err == nil && env.GetClaim().GetReplica() == replicaID {
			f(env.GetClaim())
		}
	}
}

// A replica that stood still while it wrote that a call begins writes it again: another
// attempt may have come meanwhile.
func TestBeginAcknowledgedLate(t *testing.T) {
	t.Parallel()
	onBench(t, func(b *bench) {
		begun := 0
		b.claimsOf("r", func(c *driverv1.Claim) {
			if c.GetState() == driverv1.Claim_STATE_BEGUN {
				begun++
			}
		})
		b.join("r", func(_ context.Context, r *modelReplica, t *replica.Task) *driverv1.Result {
			b.network.mu.Lock()
			b.freezeFor(r.port, time.Second+100*time.Millisecond)
			b.network.mu.Unlock()
			if err := t.BeginMutation(); err != nil {
				b.Errorf("a replica that is awake again: %v", err)
			}

			return &driverv1.Result{}
		})
		if _, err := b.caller.Call(b.ctx, benchCreate(time.Minute)); err != nil {
			b.Error(err)
		}
		if begun != 2 {
			b.Errorf("it is recorded %d times that the call begins, want once more than the late one", begun)
		}
	})
}

// Where the claim of an attempt may have been lost together with its stream, the attempt
// may have begun something: what no cloud tells apart waits for its deadline.
func TestClaimLostWithItsStream(t *testing.T) {
	t.Parallel()
	onBench(t, func(b *bench) {
		const timeout = time.Minute
		b.identity = driverv1.CreateIdentity_CREATE_IDENTITY_NONE
		begun := make(chan struct{}, 1)
		first := b.join("first", hangs(begun))
		go func() { _, _ = b.caller.Call(b.ctx, benchCreate(timeout)) }() // its manager is replaced
		<-begun
		first.port.crash()
		b.until("first is dead", func() bool { return !b.caller.replicas.lives("virtual", "first") })
		b.loseStream()
		b.until("there is a stream again", func() bool { return b.caller.Streams()[0].Ready })
		next := b.manager("next")
		defer next.Close()
		var second time.Time
		b.join("second", func(context.Context, *modelReplica, *replica.Task) *driverv1.Result {
			second = time.Now()

			return &driverv1.Result{}
		})
		asked, again := time.Now(), benchCreate(timeout)
		again.Recover, again.Attempt = true, 1
		if _, err := next.Call(b.ctx, again); err != nil {
			b.Error(err)
		}
		if waited := second.Sub(asked); waited < timeout {
			b.Errorf("the next attempt began after %s, and the lost one may have had an effect for %s", waited, timeout)
		}
	})
}

// A request that was sent before the stream was lost may fit into a new one. So that is
// made when the request is stale.
func TestLostStreamIsMadeLater(t *testing.T) {
	t.Parallel()
	onBench(t, func(b *bench) {
		b.join("r", refuses)
		b.until("the operations stream", func() bool { return b.caller.Streams()[0].Ready })
		lost := time.Now()
		b.loseStream()
		var made time.Time
		b.until("there is a stream again", func() bool {
			b.network.mu.Lock()
			defer b.network.mu.Unlock()
			for _, store := range b.network.server.byName {
				made = store.made
			}

			return !made.IsZero()
		})
		if after := made.Sub(lost); after < bus.AcceptBy {
			b.Errorf("made again after %s, want at least %s", after, bus.AcceptBy)
		}
	})
}

// A manager that stood still after it had claimed for a plain driver may have been
// replaced: what it sends then is stale sooner.
func TestPlainRequestIsAsOldAsItsClaim(t *testing.T) {
	t.Parallel()
	onBench(t, func(b *bench) {
		var claimed time.Time
		b.claimsOf(bus.PlainReplica, func(c *driverv1.Claim) {
			if c.GetState() == driverv1.Claim_STATE_BEGUN {
				claimed = time.Now()
				b.freezeFor(b.network.ports[0], opstream.AnswerTimeout-100*time.Millisecond)
			}
		})
		leave := b.plainDriver(func(env *driverv1.Envelope) *driverv1.Result {
			if env.GetCreate() == nil {
				return bus.Failure(driverv1.Code_CODE_UNIMPLEMENTED, "")
			}
			if by := env.GetAcceptBy().AsTime(); by.After(claimed.Add(bus.AcceptBy)) {
				b.Errorf("to be accepted until %s after its claim, want %s at most", by.Sub(claimed), bus.AcceptBy)
			}

			return made()
		})
		defer leave()
		if out, err := b.caller.Call(b.ctx, benchCreate(time.Minute)); err != nil || !out.Plain {
			b.Errorf("the create: %+v, %v", out, err)
		}
	})
}
