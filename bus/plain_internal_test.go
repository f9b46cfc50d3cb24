package bus

import (
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// plainDriver serves the plain tree until the function it returns is called. Each
// request is answered by a goroutine of its own; nil is no answer.
func (b *bench) plainDriver(answer func(*driverv1.Envelope) *driverv1.Result) (leave func()) {
	b.Helper()
	p := b.network.port("plain", false)
	var work sync.WaitGroup
	sub, err := p.subscribe(wildcard("default", TreePlain, "virtual", ">"), "driver", func(m *nats.Msg) {
		env, err := Decode(m.Data, "")
		if err != nil {
			b.Error(err)

			return
		}
		work.Go(func() {
			result := answer(env)
			if result == nil {
				return
			}
			payload, err := Encode(&driverv1.Envelope{
				OperationId: env.GetOperationId(), Attempt: env.GetAttempt(), Body: &driverv1.Envelope_Result{Result: result},
			}, "")
			if err != nil {
				b.Error(err)

				return
			}
			_ = p.publish(msg(m.Reply, payload)) // the test's end is not waited for
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

// markEnds is when the mark ends that a plain driver may be at work.
func (b *bench) markEnds() time.Time {
	b.network.mu.Lock()
	defer b.network.mu.Unlock()
	store := b.network.server.byName[StreamName("default", "virtual")]
	if store == nil {
		return time.Time{}
	}

	return store.records[b.caller.markSubject("virtual")].ends
}

// A create that is sent after a slow look for the instance is covered by the mark as
// long as it may run, however old the mark was when the look began.
func TestPlainMarkOutlastsASlowLook(t *testing.T) {
	t.Parallel()
	onBench(t, func(b *bench) {
		const timeout = time.Minute
		leave := b.plainDriver(func(env *driverv1.Envelope) *driverv1.Result {
			switch {
			case env.GetList() != nil:
				b.pass(env.GetTimeout().AsDuration() - time.Second)

				return &driverv1.Result{Payload: &driverv1.Result_List{List: &driverv1.ListResponse{}}}
			case env.GetCreate() != nil:
				if end := env.GetAcceptBy().AsTime().Add(env.GetTimeout().AsDuration()); b.markEnds().Before(end) {
					b.Errorf("%s may run for %s after the mark has ended", env.GetOperationId(), end.Sub(b.markEnds()))
				}

				return &driverv1.Result{}
			default:
				return failure(driverv1.Code_CODE_UNIMPLEMENTED, "")
			}
		})
		defer leave()
		first := benchCreate(timeout)
		first.OperationID = "other.create.0"
		first.Body.GetCreate().Machine.Uid = "other"
		if _, err := b.caller.Call(b.ctx, first); err != nil {
			b.Fatal(err)
		}
		b.pass(timeout) // its mark is just long enough for another create
		again := benchCreate(timeout)
		again.Recover, again.Attempt, again.Until, again.PlainUntil = true, 1, longAgo, longAgo
		if out, err := b.caller.Call(b.ctx, again); err != nil || !out.Plain {
			b.Errorf("the create: %+v, %v", out, err)
		}
	})
}

// A manager whose operation takes less time than one that the manager before has sent
// does not cut that one's mark short.
func TestPlainMarkIsNotCutShort(t *testing.T) {
	t.Parallel()
	onBench(t, func(b *bench) {
		leave := b.plainDriver(func(env *driverv1.Envelope) *driverv1.Result {
			if env.GetCreate() == nil {
				return failure(driverv1.Code_CODE_UNIMPLEMENTED, "")
			}

			return &driverv1.Result{}
		})
		defer leave()
		asks := func(id string, timeout time.Duration) (ends time.Time) {
			req := benchCreate(timeout)
			req.OperationID, req.Body.GetCreate().Machine.Uid = id+".create.0", id
			if out, err := b.caller.Call(b.ctx, req); err != nil || !out.Plain {
				b.Fatalf("create of %s: %+v, %v", id, out, err)
			}

			return b.markEnds()
		}
		long := asks("long", time.Hour)
		b.caller.Close()
		b.caller = b.manager("next")
		b.pass(time.Minute)
		kept := asks("short", time.Minute)
		if kept.Before(long) {
			b.Errorf("the next manager's mark ends %s before that of the first one's longer operation", long.Sub(kept))
		}
		if kept.After(long.Add(time.Minute)) {
			b.Errorf("the next manager's mark ends %s after that of the first one's longer operation", kept.Sub(long))
		}
		b.pass(time.Until(long) - 2*time.Minute)
		if end := asks("later", time.Minute); end.Before(time.Now().Add(time.Minute+acceptBy)) || end.After(long.Add(time.Hour)) {
			b.Errorf("a mark that is renewed ends in %s", time.Until(end))
		}
	})
}
