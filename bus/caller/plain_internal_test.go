package caller

import (
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// plainDriver serves the plain tree until the function it returns is called. Each
// request is answered by a goroutine of its own; nil is no answer.
func (b *bench) plainDriver(answer func(*driverv1.Envelope) *driverv1.Result) (leave func()) {
	b.Helper()
	p := b.network.port("plain", false)
	var work sync.WaitGroup
	sub, err := p.Subscribe(bus.Pattern("default", bus.TreePlain, "virtual", ">"), "driver", func(m *nats.Msg) {
		env, err := bus.Decode(m.Data, "")
		if err != nil {
			b.Error(err)

			return
		}
		work.Go(func() {
			result := answer(env)
			if result == nil {
				return
			}
			payload, err := bus.Encode(&driverv1.Envelope{
				OperationId: env.GetOperationId(), Attempt: env.GetAttempt(), Body: &driverv1.Envelope_Result{Result: result},
			}, "")
			if err != nil {
				b.Error(err)

				return
			}
			_ = p.Publish(msg(m.Reply, payload)) // the test's end is not waited for
		})
	})
	if err != nil {
		b.Fatal(err)
	}

	return func() {
		_ = sub.Unsubscribe() // it cannot fail
		work.Wait()
	}
}

// made is the result of a create.
func made() *driverv1.Result {
	return &driverv1.Result{Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{Instance: &driverv1.Instance{ProviderId: "i"}}}}
}

// A success that names no instance leaves open whether there is one. So the next attempt
// looks for it under the same operation.
func TestPlainSuccessWithoutProviderID(t *testing.T) {
	t.Parallel()
	onBench(t, func(b *bench) {
		creates := 0
		leave := b.plainDriver(func(env *driverv1.Envelope) *driverv1.Result {
			switch {
			case env.GetList() != nil:
				return &driverv1.Result{Payload: &driverv1.Result_List{List: &driverv1.ListResponse{
					Instances: []*driverv1.Instance{{ProviderId: "i", MachineUid: "uid", MachineName: "m"}},
				}}}
			case env.GetCreate() != nil:
				creates++

				return &driverv1.Result{Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{Instance: &driverv1.Instance{NodeName: "n"}}}}
			default:
				return bus.Failure(driverv1.Code_CODE_UNIMPLEMENTED, "")
			}
		})
		defer leave()
		out, err := b.caller.Call(b.ctx, benchCreate(time.Minute))
		if bus.OriginOf(err) != bus.OriginTimeout || bus.CodeOf(err) != driverv1.Code_CODE_INTERNAL {
			b.Fatalf("a success without a provider id: %v; want that its outcome is not known", err)
		}
		again := benchCreate(time.Minute)
		again.Recover, again.Attempt, again.Until = true, out.Attempts, out.Until
		out, err = b.caller.Call(b.ctx, again)
		if id := out.Result.GetCreate().GetInstance().GetProviderId(); err != nil || id != "i" || creates != 1 {
			b.Errorf("the next attempt: instance %q after %d creates, %v; want the one that is there", id, creates, err)
		}
	})
}

// claimEnds is when the record goes by itself that stands for the machine.
func (b *bench) claimEnds() time.Time {
	b.network.mu.Lock()
	defer b.network.mu.Unlock()

	return b.network.server.byName[bus.StreamName("default", "virtual")].records[b.claimSubject()].ends
}

// A create that is sent after a slow look for the instance is covered by its claim for as
// long as it may run, however old the claim was when the look ended.
func TestPlainClaimOutlastsASlowLook(t *testing.T) {
	t.Parallel()
	onBench(t, func(b *bench) {
		const timeout = time.Minute
		leave := b.plainDriver(func(env *driverv1.Envelope) *driverv1.Result {
			switch {
			case env.GetList() != nil:
				b.pass(env.GetTimeout().AsDuration() - time.Second)

				return &driverv1.Result{Payload: &driverv1.Result_List{List: &driverv1.ListResponse{}}}
			case env.GetCreate() != nil:
				if end := env.GetAcceptBy().AsTime().Add(env.GetTimeout().AsDuration()); b.claimEnds().Before(end) {
					b.Errorf("%s may run for %s after its claim has ended", env.GetOperationId(), end.Sub(b.claimEnds()))
				}

				return made()
			default:
				return bus.Failure(driverv1.Code_CODE_UNIMPLEMENTED, "")
			}
		})
		defer leave()
		again := benchCreate(timeout)
		again.Recover, again.Attempt, again.Until = true, 1, timeOver
		if out, err := b.caller.Call(b.ctx, again); err != nil || !out.Plain {
			b.Errorf("the create: %+v, %v", out, err)
		}
	})
}
