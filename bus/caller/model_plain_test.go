package caller

import (
	"context"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A modelPlain is a driver without sessions as the contract wants it: it does a request
// once, does not take one that is too old, begins no call that could last for longer than
// the request's timeout, and lists its instances. What a manager sends that was replaced
// does not reach it: a plain driver knows no epochs, so nothing would keep it from that.
type modelPlain struct {
	m    *model
	port *port
	sub  bus.Subscription
	work sync.WaitGroup

	mu   sync.Mutex
	done map[string]bool // by reply subject
}

// longestCall is how long a call to the model's cloud may take.
const longestCall = 5 * time.Second

func (m *model) newPlain() *modelPlain {
	p := &modelPlain{m: m, port: m.network.port("plain", false), done: map[string]bool{}}
	var err error
	if p.sub, err = p.port.Subscribe(bus.Pattern("default", bus.TreePlain, "virtual", ">"), "driver", p.take); err != nil {
		panic(err) //nolint:forbidigo // of a fixed subject
	}

	return p
}

func (p *modelPlain) close() {
	_ = p.sub.Unsubscribe() // it cannot fail
	p.work.Wait()
}

func (p *modelPlain) take(request *nats.Msg) {
	env, err := bus.Decode(request.Data, "")
	p.mu.Lock()
	again := p.done[request.Reply]
	p.done[request.Reply] = true
	p.mu.Unlock()
	if err != nil || again || env.GetEpoch() < p.m.journal.epoch() {
		return
	}
	p.work.Go(func() {
		answer := p.answer(env)
		answer.OperationId, answer.Attempt = env.GetOperationId(), env.GetAttempt()
		if payload, err := bus.Encode(answer, ""); err == nil {
			_ = p.port.Publish(msg(request.Reply, payload)) // mcm comes again
		}
	})
}

func (p *modelPlain) answer(env *driverv1.Envelope) *driverv1.Envelope {
	deadline := time.Now().Add(env.GetTimeout().AsDuration())
	result := &driverv1.Result{}
	switch op := bus.OperationOf(env); {
	case env.GetList() != nil:
		result.Payload = &driverv1.Result_List{List: p.m.cloud.list()}
	case !bus.Mutates(op):
		result = bus.Failure(driverv1.Code_CODE_UNIMPLEMENTED, "no such")
	case time.Now().After(env.GetAcceptBy().AsTime()):
		return &driverv1.Envelope{Body: &driverv1.Envelope_Busy{Busy: &driverv1.Busy{Reason: driverv1.BusyReason_BUSY_REASON_STALE}}}
	default:
		ctx, cancel := context.WithDeadline(p.m.ctx, deadline)
		defer cancel()
		looked := false
		result = p.m.cloud.work(ctx, p.port, env, func(machine string) (*cloudCall, error) {
			looked = true

			return p.begin(env, machine, deadline)
		})
		// What comes before the look says nothing of an earlier attempt.
		result.OutcomeUnknown = env.GetRecover() && !looked && result.GetStatus().GetCode() != driverv1.Code_CODE_OK ||
			result.GetStatus().GetCode() == driverv1.Code_CODE_DEADLINE_EXCEEDED
	}

	return &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: result}}
}

// begin is a call to the cloud, unless there is no time for it any more.
func (p *modelPlain) begin(env *driverv1.Envelope, machine string, deadline time.Time) (*cloudCall, error) {
	if err := p.port.pass(); err != nil {
		return nil, err
	}
	// It has no claim: it comes after whatever was claimed so far.
	records, c := p.m.network.records(), p.m.cloud
	c.mu.Lock()
	defer c.mu.Unlock()
	over := func() bool { return !time.Now().Before(deadline) }
	if time.Until(deadline) < longestCall {
		return nil, context.DeadlineExceeded
	}
	call := &cloudCall{by: p.port.name, id: env.GetOperationId(), claim: records + 1, live: true, stopped: over}
	c.judge(call, machine)

	return call, nil
}

// list returns the cloud's instances as a driver lists them.
func (c *modelCloud) list() *driverv1.ListResponse {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := &driverv1.ListResponse{}
	for machine, id := range c.instances {
		c.came(id, driverv1.Code_CODE_OK) // mcm may take it for the outcome
		list.Instances = append(list.Instances, &driverv1.Instance{ProviderId: "i-" + id, MachineUid: machine, MachineName: machine})
	}

	return list
}
