package caller

import (
	"maps"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// keepStore returns what puts the operations stream back to what it holds now.
func (b *bench) keepStore() (rollBack func()) {
	b.Helper()
	name := bus.StreamName("default", "virtual")
	b.network.mu.Lock()
	defer b.network.mu.Unlock()
	store := b.network.server.byName[name]
	records, last := maps.Clone(store.records), store.last

	return func() {
		b.network.mu.Lock()
		defer b.network.mu.Unlock()
		store.records, store.last = records, last
	}
}

// A store is put back to before a claim, and the replica that had it dies with its call
// at the cloud. That the next attempt is refused says nothing of that call, although no
// claim tells of it and the stream is older than any operation.
func TestRefusalAfterARollback(t *testing.T) {
	t.Parallel()
	for name, carried := range map[string]bool{"in one call": false, "in a later call": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onBench(t, func(b *bench) {
				begun := make(chan struct{}, 1)
				first := b.join("first", hangs(begun))
				b.pass(10 * time.Minute) // a stream that is older than any operation
				rollBack := b.keepStore()
				req := benchCreate(time.Minute)
				type answer struct {
					out *Outcome
					err error
				}
				answers := make(chan answer, 1)
				ask := func() {
					out, err := b.caller.Call(b.ctx, req)
					for bus.CodeOf(err) == driverv1.Code_CODE_UNAVAILABLE && b.caller.Streams()[0].Rollbacks > 0 {
						b.pass(100 * time.Millisecond) // the stream is made again after some time
						again := req
						again.Recover = true
						carryOutcome(&again, out)
						out, err = b.caller.Call(b.ctx, again)
					}
					answers <- answer{out, err}
				}
				go ask()
				<-begun
				b.pass(2 * streamCheck) // the stream was looked at since
				if carried {
					first.port.crash()
					got := <-answers
					if bus.OriginOf(got.err) != bus.OriginTimeout {
						b.Fatalf("after the replica's death: %v", got.err)
					}
					req.Recover = true
					carryOutcome(&req, got.out)
				} else {
					b.join("second", refuses)
					first.port.crash()
				}
				rollBack()
				b.caller.streams.checkAll()
				if carried {
					b.until("it is noticed", func() bool { return b.caller.Streams()[0].Rollbacks == 1 })
					b.join("second", refuses)
					go ask()
				}
				got := <-answers
				if bus.OriginOf(got.err) != bus.OriginTimeout || bus.CodeOf(got.err) != driverv1.Code_CODE_RESOURCE_EXHAUSTED {
					b.Errorf("refused beside a call that the store has forgotten: %v (%v), want that it is not known", got.err, bus.OriginOf(got.err))
				}
				if n := b.caller.Streams()[0].Rollbacks; n != 1 {
					b.Errorf("%d rollbacks were noticed, want 1", n)
				}
			})
		})
	}
}
