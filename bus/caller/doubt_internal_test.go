package caller

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A bench is a manager on the model's wire, for a scenario in steps.
type bench struct {
	*testing.T
	*model

	caller *Caller
}

// onBench runs a test on the model's bus, under the model's clock.
func onBench(t *testing.T, story func(*bench)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		b := &bench{T: t, model: &model{
			ctx: ctx, log: slog.New(slog.DiscardHandler), network: newNetwork(1), cloud: newModelCloud(1, driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN),
			identity: driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN,
		}}
		var network sync.WaitGroup
		network.Go(func() { b.network.run(ctx) })
		b.caller = b.manager("mcm")
		story(b)
		b.caller.Close()
		for _, r := range b.all {
			r.stop()
			<-r.ended
		}
		cancel()
		network.Wait()
	})
}

func (b *bench) manager(name string) *Caller {
	b.Helper()
	operations := &StreamConfig{first: b.network.first}
	caller, err := New(b.network.port(name, true), Config{Cluster: "default", Operations: operations, Logger: b.log})
	if err != nil {
		b.Fatal(err)
	}

	return caller
}

// join starts a replica and returns when the manager knows of it.
func (b *bench) join(name string, handle func(context.Context, *modelReplica, *replica.Task) *driverv1.Result) *modelReplica {
	b.Helper()
	r := b.replicaWith(name, handle)
	b.all = append(b.all, r)
	b.until(name+" is known", func() bool { return b.caller.replicas.lives("virtual", name) })

	return r
}

// until lets the model's time pass until something is so.
func (b *bench) until(what string, is func() bool) {
	b.Helper()
	for range 10000 {
		if is() {
			return
		}
		b.pass(10 * time.Millisecond)
	}
	b.Fatalf("in vain: %s", what)
}

// loseStream takes the operations stream away, and has the manager make a new one.
func (b *bench) loseStream() {
	b.network.mu.Lock()
	clear(b.network.server.byName)
	b.network.mu.Unlock()
	b.caller.streams.checkAll()
}

func benchCreate(timeout time.Duration) Request {
	return Request{
		Provider: "virtual", Namespace: "shop", Name: "m", OperationID: "uid.create.0", Timeout: timeout,
		Body: &driverv1.Envelope{Body: &driverv1.Envelope_Create{Create: &driverv1.CreateRequest{
			Machine: &driverv1.Machine{Uid: "uid", Name: "m", Namespace: "shop"},
		}}},
	}
}

// refuses is a driver whose cloud has no quota left.
func refuses(_ context.Context, _ *modelReplica, t *replica.Task) *driverv1.Result {
	if err := t.BeginMutation(); err != nil {
		return bus.Failure(bus.CodeOf(err), err.Error())
	}

	return bus.Failure(driverv1.Code_CODE_RESOURCE_EXHAUSTED, "no quota")
}

// hangs is a driver whose cloud is long at it.
func hangs(begun chan<- struct{}) func(context.Context, *modelReplica, *replica.Task) *driverv1.Result {
	return func(ctx context.Context, r *modelReplica, t *replica.Task) *driverv1.Result {
		if err := t.BeginMutation(); err == nil {
			begun <- struct{}{}
		}
		err := r.nap(ctx, time.Hour)

		return bus.Failure(bus.CodeOf(err), err.Error())
	}
}

// That a cloud refuses an attempt says nothing of the call that a lost one has made,
// for as long as that may run; afterwards it does.
func TestRefusalBesideALostCall(t *testing.T) {
	t.Parallel()
	onBench(t, func(b *bench) {
		begun := make(chan struct{}, 1)
		first := b.join("first", hangs(begun))
		req := benchCreate(time.Minute)
		type answer struct {
			out *Outcome
			err error
		}
		answers := make(chan answer, 1)
		start := time.Now()
		go func() {
			out, err := b.caller.Call(b.ctx, req)
			answers <- answer{out, err}
		}()
		<-begun
		b.join("second", refuses)
		first.port.crash()
		got := <-answers
		end := start.Add(bus.AcceptBy + req.Timeout) // by when the lost call is over
		for tries := 0; time.Now().Before(end); tries++ {
			r := got.out.Result
			if bus.OriginOf(got.err) != bus.OriginTimeout || r.GetStatus().GetCode() != driverv1.Code_CODE_RESOURCE_EXHAUSTED || !r.GetOutcomeUnknown() || !r.GetNoEffect() {
				b.Fatalf("answer %d = %v (%v), %+v; want the refusal, and that it says nothing of the operation", tries, got.err, bus.OriginOf(got.err), r)
			}
			if got.out.Until.After(end.Add(time.Second)) {
				b.Fatalf("after %d refusals it is said to run until %s after its deadline: it would never be over", tries, got.out.Until.Sub(end))
			}
			req.Recover, req.Attempt, req.Until = true, got.out.Attempts, got.out.Until
			b.pass(10 * time.Second)
			got.out, got.err = b.caller.Call(b.ctx, req)
		}
		if bus.OriginOf(got.err) != bus.OriginDriver || bus.CodeOf(got.err) != driverv1.Code_CODE_RESOURCE_EXHAUSTED || got.out.Result.GetOutcomeUnknown() {
			b.Errorf("once the lost call is over: %v (%v), %+v; want the refusal", got.err, bus.OriginOf(got.err), got.out.Result)
		}
	})
}

// Another manager does not know when which attempts were made. Where none was ever
// claimed, nothing is at the cloud, and a refusal counts.
func TestRefusalAfterAFailover(t *testing.T) {
	t.Parallel()
	const timeout = time.Minute
	for name, tc := range map[string]struct {
		age    time.Duration
		origin bus.Origin
		reason string
	}{
		"nothing was claimed":        {2 * timeout, bus.OriginDriver, "the stream would know of whatever may still run"},
		"unknown history":            {timeout / 2, bus.OriginTimeout, "a stream before this one may have had the claim"},
		"what was, has had its time": {bus.AcceptBy + timeout + time.Second, bus.OriginDriver, "whatever was claimed before is over"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onBench(t, func(b *bench) {
				b.join("replica", refuses)
				b.pass(tc.age)
				req := benchCreate(timeout)
				req.Recover, req.Attempt = true, 1
				_, err := b.caller.Call(b.ctx, req)
				if bus.OriginOf(err) != tc.origin || bus.CodeOf(err) != driverv1.Code_CODE_RESOURCE_EXHAUSTED {
					b.Errorf("%v (%v), want the refusal by the %v: %s", err, bus.OriginOf(err), tc.origin, tc.reason)
				}
			})
		})
	}
}

// A manager learns of replicas that have not heard of it, for as long as there are.
func TestBehind(t *testing.T) {
	t.Parallel()
	onBench(t, func(b *bench) {
		leader, err := New(b.network.port("leader", true), Config{
			Cluster: "default", Epoch: func() uint64 { return 2 }, Logger: b.log,
		})
		if err != nil {
			b.Fatal(err)
		}
		defer leader.Close()
		b.join("replica", refuses)
		<-leader.Behind()
		payload, err := bus.Encode(&driverv1.Envelope{Body: &driverv1.Envelope_Hello{Hello: &driverv1.Hello{Cluster: "default", Epoch: 2}}}, "")
		if err != nil {
			b.Fatal(err)
		}
		if err := b.network.port("leader's announcer", true).Publish(&nats.Msg{Subject: bus.Pattern("default", bus.TreeHello), Data: payload}); err != nil {
			b.Fatal(err)
		}
		b.pass(2 * bus.SessionInterval)
		select {
		case <-leader.Behind(): // of before
		default:
		}
		b.pass(10 * bus.SessionInterval)
		select {
		case <-leader.Behind():
			b.Error("the replica knows who leads")
		default:
		}
	})
}

// A stream is lost and made again while a replica that has claimed an operation neither
// hears of that nor is heard. It begins nothing beside the attempt that is claimed in the
// new stream.
func TestStreamLostBeforeACallBegins(t *testing.T) {
	t.Parallel()
	onBench(t, func(b *bench) {
		accepted, goOn, said := make(chan struct{}), make(chan struct{}), make(chan error, 1)
		first := b.join("first", func(_ context.Context, _ *modelReplica, t *replica.Task) *driverv1.Result {
			close(accepted)
			<-goOn
			err := t.BeginMutation()
			said <- err

			return bus.Failure(bus.CodeOf(err), "late")
		})
		// What the first one says after its claim is stored does not reach the manager.
		b.network.server.onPut = func(_ string, _, after []byte) {
			if env, err := bus.Decode(after, ""); err == nil && env.GetClaim().GetReplica() == "first" {
				b.network.apart[first.port] = true
			}
		}
		done := make(chan error, 1)
		start := time.Now()
		go func() {
			_, err := b.caller.Call(b.ctx, benchCreate(time.Minute))
			for bus.OriginOf(err) == bus.OriginTimeout {
				b.pass(100 * time.Millisecond) // the stream is made again after some time
				again := benchCreate(time.Minute)
				again.Recover, again.Attempt = true, 1
				_, err = b.caller.Call(b.ctx, again)
			}
			done <- err
		}()
		<-accepted
		var beside error
		b.join("second", func(_ context.Context, _ *modelReplica, t *replica.Task) *driverv1.Result {
			if err := t.BeginMutation(); err != nil {
				return bus.Failure(bus.CodeOf(err), err.Error())
			}
			close(goOn)
			beside = <-said // while this one's call is at the cloud

			return &driverv1.Result{}
		})
		// Just before the manager gives up its wait for an answer of the first one.
		b.pass(time.Until(start.Add(2*acceptTimeout - 50*time.Millisecond)))
		b.loseStream()
		if err := <-done; err != nil {
			b.Errorf("the operation: %v", err)
		}
		if bus.CodeOf(beside) != driverv1.Code_CODE_ABORTED {
			b.Errorf("beside a second attempt, the first one may begin a call: %v; want that it is fenced", beside)
		}
	})
}
