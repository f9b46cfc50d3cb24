package bus

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A bench is a manager on the model's wire, for a story that is told step by step.
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
			r.server.ops.tasks.Wait()
		}
		cancel()
		network.Wait()
	})
}

func (b *bench) manager(name string) *Caller {
	b.Helper()
	operations := &StreamConfig{first: b.network.first}
	caller, err := newCaller(b.network.port(name, true), CallerConfig{Cluster: "default", Operations: operations, Logger: b.log})
	if err != nil {
		b.Fatal(err)
	}

	return caller
}

// join starts a replica and returns when the manager knows of it.
func (b *bench) join(name string, handle func(context.Context, *modelReplica, *Task) *driverv1.Result) *modelReplica {
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
func refuses(_ context.Context, _ *modelReplica, t *Task) *driverv1.Result {
	if err := t.BeginMutation(); err != nil {
		return failure(CodeOf(err), err.Error())
	}

	return failure(driverv1.Code_CODE_RESOURCE_EXHAUSTED, "no quota")
}

// hangs is a driver whose cloud is long at it.
func hangs(begun chan<- struct{}) func(context.Context, *modelReplica, *Task) *driverv1.Result {
	return func(ctx context.Context, r *modelReplica, t *Task) *driverv1.Result {
		if err := t.BeginMutation(); err == nil {
			begun <- struct{}{}
		}
		err := r.nap(ctx, time.Hour)

		return failure(CodeOf(err), err.Error())
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
		end := start.Add(acceptBy + req.Timeout) // by when the lost call is over
		for tries := 0; time.Now().Before(end); tries++ {
			r := got.out.Result
			if OriginOf(got.err) != OriginTimeout || r.GetStatus().GetCode() != driverv1.Code_CODE_RESOURCE_EXHAUSTED || !r.GetOutcomeUnknown() || !r.GetNoEffect() {
				b.Fatalf("answer %d = %v (%v), %+v; want the refusal, and that it says nothing of the operation", tries, got.err, OriginOf(got.err), r)
			}
			if got.out.Until.After(end.Add(time.Second)) {
				b.Fatalf("after %d refusals it is said to run until %s after its deadline: it would never be over", tries, got.out.Until.Sub(end))
			}
			req.Recover, req.Attempt, req.Until = true, got.out.Attempts, got.out.Until
			b.pass(10 * time.Second)
			got.out, got.err = b.caller.Call(b.ctx, req)
		}
		if OriginOf(got.err) != OriginDriver || CodeOf(got.err) != driverv1.Code_CODE_RESOURCE_EXHAUSTED || got.out.Result.GetOutcomeUnknown() {
			b.Errorf("once the lost call is over: %v (%v), %+v; want the refusal", got.err, OriginOf(got.err), got.out.Result)
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
		origin Origin
		reason string
	}{
		"nothing was claimed":        {2 * timeout, OriginDriver, "the stream would know of whatever may still run"},
		"nobody knows what was":      {timeout / 2, OriginTimeout, "a stream before this one may have had the claim"},
		"what was, has had its time": {acceptBy + timeout + time.Second, OriginDriver, "whatever was claimed before is over"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onBench(t, func(b *bench) {
				b.join("replica", refuses)
				b.pass(tc.age)
				req := benchCreate(timeout)
				req.Recover, req.Attempt = true, 1
				_, err := b.caller.Call(b.ctx, req)
				if OriginOf(err) != tc.origin || CodeOf(err) != driverv1.Code_CODE_RESOURCE_EXHAUSTED {
					b.Errorf("%v (%v), want the refusal by the %v: %s", err, OriginOf(err), tc.origin, tc.reason)
				}
			})
		})
	}
}

// What fails is known only if no other attempt of a create may be at work: also where
// that is said of one which began as the first.
func TestDoubt(t *testing.T) {
	t.Parallel()
	const create, remove = driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_DELETE
	for name, tc := range map[string]struct {
		operation driverv1.Operation
		*held
		recover, unknown bool
	}{
		"the only attempt":                     {create, &held{begun: true}, false, false},
		"it was to recover, and looked":        {create, &held{begun: true}, true, false},
		"it was to recover, and did not look":  {create, &held{}, true, true},
		"another may run":                      {create, &held{begun: true, earlierMayRun: true}, true, true},
		"another may run, of which it hears":   {create, &held{begun: true, earlierMayRun: true}, false, true},
		"another may run, and it began no way": {create, &held{earlierMayRun: true}, false, true},
		"another delete may run":               {remove, &held{begun: true, earlierMayRun: true}, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tc.held.operation, tc.request = tc.operation, &driverv1.Envelope{Recover: tc.recover}
			got := failure(driverv1.Code_CODE_RESOURCE_EXHAUSTED, "no quota")
			tc.doubt(got, false)
			if got.GetOutcomeUnknown() != tc.unknown || got.GetNoEffect() != tc.unknown {
				t.Errorf("outcome_unknown %t, no_effect %t; want both %t", got.GetOutcomeUnknown(), got.GetNoEffect(), tc.unknown)
			}
		})
	}
}

// A replica that has kept the refusal of an earlier attempt does not answer with it
// who asks about a later one, unless by the claim there was none in between.
func TestOutdated_Refusal(t *testing.T) {
	t.Parallel()
	refused := failure(driverv1.Code_CODE_RESOURCE_EXHAUSTED, "no quota")
	for name, tc := range map[string]struct {
		request *held
		result  *driverv1.Result
		want    bool
		reason  string
	}{
		"an attempt in between may run": {&held{attempt: 3, earlierMayRun: true}, refused, true, "the refusal is older"},
		"none does, by the claim":       {&held{attempt: 3, claim: 7}, refused, false, "the refusal is the outcome"},
		"none did, by the first claim":  {&held{attempt: 3, claim: 5}, refused, false, "that was this replica's, too"},
		"one may have run":              {&held{attempt: 3, claim: 9}, refused, true, "the refusal is older, and there may be an instance"},
		"one had run before":            {&held{attempt: 3, claim: 4}, refused, true, "it is not this replica's claim"},
		"the same attempt":              {&held{attempt: 1, earlierMayRun: true}, refused, false, "it is asked about this very one"},
		"the same, nothing in between":  {&held{attempt: 1}, refused, false, "it is asked about this very one"},
		"it was made":                   {&held{attempt: 3, earlierMayRun: true}, &driverv1.Result{}, false, "there is the instance"},
		"it runs":                       {&held{attempt: 3, earlierMayRun: true}, nil, false, "two of one machine never run here"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tc.request.request = &driverv1.Envelope{ClaimTerms: &driverv1.ClaimTerms{}}
			if tc.request.claim != 0 {
				tc.request.request.ClaimTerms.Sequence = &tc.request.claim
			}
			has := &held{attempt: 1, firstClaim: 5, claim: 7, result: tc.result}
			if got := has.outdated(tc.request); got != tc.want {
				t.Errorf("outdated = %t, want %t: %s", got, tc.want, tc.reason)
			}
		})
	}
}

// A manager learns of replicas that have not heard of it, for as long as there are.
func TestBehind(t *testing.T) {
	t.Parallel()
	onBench(t, func(b *bench) {
		leader, err := newCaller(b.network.port("leader", true), CallerConfig{
			Cluster: "default", Epoch: func() uint64 { return 2 }, Logger: b.log,
		})
		if err != nil {
			b.Fatal(err)
		}
		defer leader.Close()
		r := b.join("replica", refuses)
		<-leader.Behind()
		r.server.managers.leads("default", 2) // as by a hello
		b.pass(2 * SessionInterval)
		select {
		case <-leader.Behind(): // of before
		default:
		}
		b.pass(10 * SessionInterval)
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
		first := b.join("first", func(_ context.Context, _ *modelReplica, t *Task) *driverv1.Result {
			close(accepted)
			<-goOn
			err := t.BeginMutation()
			said <- err

			return failure(CodeOf(err), "late")
		})
		// What the first one says after its claim is stored does not reach the manager.
		b.network.server.onPut = func(_ string, _, after []byte) {
			if env, err := Decode(after, ""); err == nil && env.GetClaim().GetReplica() == "first" {
				b.network.apart[first.port] = true
			}
		}
		done := make(chan error, 1)
		start := time.Now()
		go func() {
			_, err := b.caller.Call(b.ctx, benchCreate(time.Minute))
			for OriginOf(err) == OriginTimeout {
				b.pass(100 * time.Millisecond) // the stream is made again after some time
				again := benchCreate(time.Minute)
				again.Recover, again.Attempt = true, 1
				_, err = b.caller.Call(b.ctx, again)
			}
			done <- err
		}()
		<-accepted
		var beside error
		b.join("second", func(_ context.Context, _ *modelReplica, t *Task) *driverv1.Result {
			if err := t.BeginMutation(); err != nil {
				return failure(CodeOf(err), err.Error())
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
		if CodeOf(beside) != driverv1.Code_CODE_ABORTED {
			b.Errorf("beside a second attempt, the first one may begin a call: %v; want that it is fenced", beside)
		}
	})
}
