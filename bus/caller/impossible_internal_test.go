package caller

import (
	"context"
	"strings"
	"testing"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A server takes less than it did when a result was kept. Who asks for that again hears
// that it is not known; what is stored is found.
func TestKeptResultDoesNotFitAnyMore(t *testing.T) {
	t.Parallel()
	onBench(t, func(b *bench) {
		const large = 3000
		looked := 0
		r := b.join("replica", func(_ context.Context, _ *modelReplica, t *replica.Task) *driverv1.Result {
			if err := t.BeginMutation(); err != nil {
				return bus.Failure(bus.CodeOf(err), err.Error())
			}
			made := &driverv1.CreateResponse{Instance: &driverv1.Instance{ProviderId: "virtual://m"}}
			if t.Request.GetRecover() {
				looked++
			} else {
				made.LastKnownState = strings.Repeat("x", large)
			}

			return &driverv1.Result{Payload: &driverv1.Result_Create{Create: made}}
		})
		req := benchCreate(operationTime)
		if _, err := b.caller.Call(b.ctx, req); err != nil {
			b.Fatal(err)
		}
		b.pass(2 * bus.SessionInterval)
		b.network.mu.Lock()
		r.port.most = large
		b.network.mu.Unlock()
		req.Recover, req.Attempt = true, 1
		out, err := b.caller.Call(b.ctx, req)
		if bus.OriginOf(err) != bus.OriginTimeout || bus.CodeOf(err) != driverv1.Code_CODE_INTERNAL || !out.Result.GetOutcomeUnknown() {
			b.Fatalf("asked again: %v (%v), %v; want that it is not known", err, bus.OriginOf(err), out.Result)
		}
		req.Attempt, req.Until = out.Attempts, out.Until
		b.pass(2 * bus.SessionInterval) // sessions list it no more
		out, err = b.caller.Call(b.ctx, req)
		if err != nil || out.Result.GetCreate().GetInstance().GetProviderId() != "virtual://m" {
			b.Errorf("and again: %v, %v; want the instance", err, out.Result)
		}
		if looked != 0 {
			b.Errorf("%d further attempts, want none", looked)
		}
	})
}
