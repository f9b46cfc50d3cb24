package caller

import (
	"context"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A replica claims a create, and the manager hears nothing of it for longer than it waits
// for a first frame: it finds the attempt again, and makes no other one.
func TestSilentRequestIsFoundAgain(t *testing.T) {
	t.Parallel()
	onBench(t, func(b *bench) {
		entered, end, runs := make(chan struct{}, 9), make(chan struct{}), 0
		r := b.join("replica", func(context.Context, *modelReplica, *replica.Task) *driverv1.Result {
			runs++
			entered <- struct{}{}
			<-end

			return &driverv1.Result{Payload: &driverv1.Result_Create{
				Create: &driverv1.CreateResponse{Instance: &driverv1.Instance{ProviderId: "virtual://m"}},
			}}
		})
		b.network.server.onPut = func(string, []byte, []byte) { b.network.apart[r.port] = true }
		type answer struct {
			out *Outcome
			err error
		}
		done := make(chan answer, 1)
		go func() {
			out, err := b.caller.Call(b.ctx, benchCreate(time.Minute))
			done <- answer{out, err}
		}()
		<-entered
		b.pass(2 * acceptTimeout)
		b.network.mu.Lock()
		b.network.server.onPut = nil
		delete(b.network.apart, r.port)
		b.network.mu.Unlock()
		b.pass(2 * acceptTimeout)
		close(end)
		if got := <-done; got.err != nil || got.out.Attempts != 1 || runs != 1 {
			b.Errorf("%+v, %v after %d runs; want attempt 1, and no other run", got.out, got.err, runs)
		}
	})
}
