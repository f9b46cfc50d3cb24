package caller

import (
	"strings"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A full replica is lost with a create, and a plain driver has taken its place. Nothing
// reports whether that would find what the lost one's call still makes: it is asked once
// that call is over, whoever leads then, and at once where there was none.
func TestFullReplacedByPlain(t *testing.T) {
	t.Parallel()
	const timeout, settle = time.Minute, 10 * time.Second
	for _, identity := range driverv1.CreateIdentity_value {
		for name, tc := range map[string]struct {
			begun, failover bool
			waits           time.Duration
		}{
			"by the same manager":                   {begun: true, waits: timeout + settle},
			"under the next manager":                {begun: true, failover: true, waits: timeout},
			"under the next one, nothing was begun": {failover: true},
		} {
			id := driverv1.CreateIdentity(identity)
			t.Run(strings.ToLower(strings.TrimPrefix(id.String(), "CREATE_IDENTITY_"))+" "+name, func(t *testing.T) {
				t.Parallel()
				onBench(t, func(b *bench) {
					b.identity, b.settle = id, settle
					b.replacedByPlain(timeout, tc.begun, tc.failover, tc.waits)
				})
			})
		}
	}
}

func (b *bench) replacedByPlain(timeout time.Duration, begins, failover bool, waits time.Duration) {
	begun := make(chan struct{}, 1)
	full := b.replicaWith("full", hangs(begun))
	b.all = append(b.all, full)
	b.pass(2 * timeout) // a stream that is older than any operation
	type answer struct {
		out *Outcome
		err error
	}
	req, first, answers := benchCreate(timeout), b.caller, make(chan answer, 1)
	if begins {
		go func() {
			out, err := first.Call(b.ctx, req)
			answers <- answer{out, err}
		}()
		<-begun
	}
	start := time.Now()
	full.port.crash()
	asked := make(chan time.Duration, 9)
	defer b.plainDriver(func(env *driverv1.Envelope) *driverv1.Result {
		switch {
		case env.GetList() != nil:
			asked <- time.Since(start)

			return &driverv1.Result{Payload: &driverv1.Result_List{List: &driverv1.ListResponse{}}}
		case env.GetCreate() != nil:
			return made()
		default:
			return bus.Failure(driverv1.Code_CODE_UNIMPLEMENTED, "")
		}
	})()
	got := answer{&Outcome{Attempts: 1}, bus.OutcomeUnknownf("the manager before has left it")}
	switch {
	case failover:
		first.Close()
		b.caller = b.manager("next")
		b.caller.streams.of("virtual")
	case begins:
		got = <-answers
	}
	for tries := 0; bus.OriginOf(got.err) == bus.OriginTimeout && tries < 100; tries++ {
		req.Recover = true
		carryOutcome(&req, got.out)
		got.out, got.err = b.caller.Call(b.ctx, req)
		b.pass(time.Second)
	}
	if got.err != nil || !got.out.Plain {
		b.Fatalf("the create: %+v, %v", got.out, got.err)
	}
	if at := <-asked; at < waits || waits == 0 && at > timeout/2 {
		b.Errorf("the plain driver was asked %s after the loss of a replica whose call may take %s", at, waits)
	}
}
