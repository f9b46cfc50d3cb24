package caller

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/opstream"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// plainSeenFor is how long a plain driver counts as connected after an answer.
const plainSeenFor = 30 * time.Second

// A plainCall asks a driver without sessions: one request, one reply. Such a driver gets
// work only while no full replica of the provider lives, as nothing shows whether it is
// alive. Its silence means nothing before the operation's timeout; then the outcome is
// unknown. The Caller claims for it, with a record that expires after the deadline.
type plainCall struct{ claimReader }

func newPlainCall(k *call) *plainCall { return &plainCall{claimReader{call: k}} }

// read runs an operation that may run any number of times.
func (p *plainCall) read(ctx context.Context) error {
	if err := p.noReplicaLives(); err != nil {
		return err
	}

	return p.ask(ctx)
}

// mutate runs an operation that must not take effect twice.
func (p *plainCall) mutate(ctx context.Context) error {
	if err := p.noReplicaLives(); err != nil {
		return err
	}
	if p.c.plainUnseen(p.req.Provider) {
		there, err := p.listens(ctx)
		switch {
		case err != nil:
			return err
		case !there:
			return p.noDriver()
		}
	}
	if done, err := p.claim(ctx); done {
		return err
	}
	if p.recover && p.op == driverv1.Operation_OPERATION_CREATE {
		found, err := p.findInstance(ctx)
		switch {
		case ctx.Err() != nil:
			return ctx.Err() //nolint:wrapcheck // the caller's own
		case err != nil:
			// The error is about the list, not about the create.
			return bus.OutcomeUnknownf("cannot look for an instance of an earlier create: %w", err)
		case found != nil:
			p.out.Result, p.out.Plain = found, true

			return nil
		}
		// The claim may have expired during the list.
		if done, err := p.claim(ctx); done {
			return err
		}
	}

	return p.ask(ctx)
}

// ask asks a plain driver and ends the call with its answer.
func (p *plainCall) ask(ctx context.Context) error {
	result, err := p.request(ctx)
	if err != nil {
		return err
	}
	p.out.Plain = true
	if instance, _ := opstream.InstanceOf(result); p.op == driverv1.Operation_OPERATION_CREATE &&
		result.GetStatus().GetCode() == driverv1.Code_CODE_OK && instance.GetProviderId() == "" {
		// There may be an instance that cannot be found by its id: the next attempt looks.
		result = bus.Failure(driverv1.Code_CODE_INTERNAL,
			"the driver of provider "+p.req.Provider+" answered create with success, but without the instance's provider id [INSTANCE-1]")
		result.OutcomeUnknown = true
	}
	if result.GetOutcomeUnknown() {
		p.release(ctx) // it has ended and may be retried at once
		p.noteEnded(p.number)
	}

	return p.endWithResult(result)
}

// noReplicaLives returns nil if no full replica of the provider is known.
func (p *plainCall) noReplicaLives() error {
	if len(p.c.replicas.live(p.req.Provider)) > 0 {
		// It is not yet known to be dead, is stopping, or has just started.
		return p.tryError("no replica of provider %s answers; waiting until a replica answers or all count as dead", p.req.Provider)
	}

	return nil
}

// claim claims the call's operation for a plain driver. Done means that the call has
// ended.
func (p *plainCall) claim(ctx context.Context) (done bool, err error) {
	for range maxClaimReads {
		switch d, err := p.checkClaim(ctx); d {
		case isDone:
			return true, err
		case mayAttach:
			return true, p.tryError("replica %s has the operation", p.target)
		default:
		}
		if err := p.waitForEarlierAttempts(ctx); err != nil {
			return true, err
		}
		if err := p.noReplicaLives(); err != nil {
			return true, err
		}
		if p.req.OnlyIfHeld || p.req.Look {
			return true, p.notHeld()
		}
		if p.mayHaveEffect() {
			p.number, p.recover = p.lastRan+1, true
		}
		// When the record expires, the operation has ended and the cloud's lists show its effect.
		_, settle := p.c.replicas.identity(p.req.Provider)
		life := bus.AcceptBy + p.req.Timeout + settle
		claimedAt := time.Now()
		sequence, err := p.write(ctx, driverv1.Claim_STATE_BEGUN, *p.replaces, life)
		switch {
		case ctx.Err() != nil:
			return true, ctx.Err() //nolint:wrapcheck // the caller's own
		case errors.Is(err, opstream.ErrConflict):
			continue // a replica has connected, or another manager leads
		case err != nil:
			p.c.recheckStream(p.req.Provider)

			return true, p.tryError("cannot claim the machine for a driver without sessions: %w", err)
		}
		p.plainClaim, p.plainClaimAt = sequence, claimedAt

		return false, nil
	}

	return true, p.tryError("the claim on the machine keeps changing; retrying")
}

// write replaces the record with the expected sequence by a claim for a plain driver that
// expires after life; 0 means the stream's limit.
func (p *plainCall) write(ctx context.Context, state driverv1.Claim_State, expected uint64, life time.Duration) (uint64, error) {
	subject, err := opstream.ClaimSubject(p.c.cfg.Cluster, p.req.Provider, bus.MachineOf(p.req.Body).GetUid())
	if err != nil {
		return 0, err
	}
	if life > 0 {
		life = life.Truncate(time.Second) + time.Second // a TTL has whole seconds
	}

	return p.c.ledger(p.req.Provider).Put(ctx, subject, &driverv1.Envelope{
		OperationId: p.req.OperationID, Attempt: p.number, Replica: bus.PlainReplica,
		Body: &driverv1.Envelope_Claim{Claim: &driverv1.Claim{
			OperationId: p.req.OperationID, Attempt: p.number, Operation: p.op, Namespace: p.req.Namespace, Name: p.req.Name,
			Provider: p.req.Provider, Replica: bus.PlainReplica, Epoch: p.c.cfg.Epoch(), State: state, ClaimedAt: timestamppb.Now(),
		}},
	}, expected, life)
}

// waitForEarlierAttempts delays a create at a plain driver until the cloud's lists show
// the effects of earlier attempts, or a replica connects: plain drivers do not declare an
// identity. If the stream lost the claim, any mutation waits for the earlier deadlines, as
// a plain driver may still run one.
func (p *plainCall) waitForEarlierAttempts(ctx context.Context) error {
	end := p.lastDeadline()
	_, settle := p.c.replicas.identity(p.req.Provider)
	switch {
	case !p.earlierCreate.IsZero():
		end = later(end, p.earlierCreate).Add(settle)
	case p.lastRan == 0, p.nothingBegun:
		return nil
	case p.op == driverv1.Operation_OPERATION_CREATE:
		end = end.Add(settle)
	case *p.replaces != 0:
		return nil
	}
	for said := false; time.Now().Before(end) && len(p.c.replicas.live(p.req.Provider)) == 0; said = true {
		if !said {
			p.reportWaiting(p.tryError("an earlier attempt was lost, and only a driver without sessions is connected: "+
				"waiting for the deadline of that attempt and the settle time of provider %s, until %s", p.req.Provider, end.UTC().Format(time.RFC3339)))
		}
		if err := sleep(ctx, recheckInterval); err != nil {
			return err
		}
	}

	return nil
}

// listens reports whether a plain driver subscribes, by a request without a body. A driver
// answers that it does not know such a request [ENV-4]. One that does not answer counts
// as connected, too.
func (p *plainCall) listens(ctx context.Context) (there bool, err error) {
	subject, err := bus.Subject{
		Cluster: p.c.cfg.Cluster, Tree: bus.TreePlain, Provider: p.req.Provider,
		Verb: bus.Verb(driverv1.Operation_OPERATION_STATUS), Namespace: p.req.Namespace, Name: p.req.Name,
	}.Build()
	if err != nil {
		return false, p.unsendable(err)
	}
	heard := make(chan bool, 1)
	reply, done := p.c.register(p.req.Provider, func(m *nats.Msg) {
		select {
		case heard <- !bus.IsNoResponders(m):
		default:
		}
	})
	defer done()
	if err := p.c.publish(subject, reply, "", &driverv1.Envelope{OperationId: nuid.Next(), Epoch: p.c.cfg.Epoch()}); err != nil {
		return false, p.notConnected()
	}
	limit := time.NewTimer(acceptTimeout)
	defer limit.Stop()
	select {
	case there = <-heard:
		p.c.sawPlain(p.req.Provider, there)

		return there, nil
	case <-limit.C:
		return true, nil
	case <-ctx.Done():
		return false, ctx.Err() //nolint:wrapcheck // the caller's own
	}
}

// sawPlain notes whether a plain driver of a provider is connected.
func (c *Caller) sawPlain(provider string, there bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if there {
		c.plainSeen[provider] = time.Now()
	} else {
		delete(c.plainSeen, provider)
	}
}

// plainUnseen reports whether no plain driver of a provider has answered recently.
func (c *Caller) plainUnseen(provider string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()

	return time.Since(c.plainSeen[provider]) > plainSeenFor
}

func (k *call) noDriver() error {
	return k.noRoom("no driver for provider %s is connected (cluster %q): start one, or correct the provider in the class",
		k.req.Provider, k.c.cfg.Cluster)
}

// release releases a claim under which nothing runs, so that no call waits for it to
// expire.
func (p *plainCall) release(ctx context.Context) {
	if p.plainClaim == 0 {
		return
	}
	if _, err := p.write(ctx, driverv1.Claim_STATE_RELEASED, p.plainClaim, 0); err != nil {
		p.log().Warn("cannot release the claim for a driver without sessions; it stays until the operation's deadline", "err", err)
	}
	p.plainClaim = 0
}

// request sends a request on the plain tree and waits for its reply.
func (p *plainCall) request(ctx context.Context) (*driverv1.Result, error) {
	a := newAttempt(p.req.OperationID, p.number, bus.TreePlain, "")
	unregister, err := p.send(a)
	defer unregister()
	if err != nil {
		return nil, p.notSent(err)
	}
	limit := time.NewTimer(p.req.Timeout)
	defer limit.Stop()
	for {
		select {
		case <-a.notify:
			h := a.snapshot()
			switch {
			case h.result != nil:
				p.taken = p.lastTry
				p.c.sawPlain(p.req.Provider, true)
				p.noteMayHaveRun() // endWithResult decides whether it has ended

				return h.result, nil
			case h.busy != nil:
				p.release(ctx)

				return nil, p.allBusy()
			case h.noResponder:
				p.c.sawPlain(p.req.Provider, false)
				p.release(ctx)

				return nil, p.noDriver()
			}
		case <-limit.C:
			p.noteMayHaveRun()

			return nil, bus.OutcomeUnknownf("the plain driver of provider %s did not answer within %s", p.req.Provider, p.req.Timeout)
		case <-ctx.Done():
			return nil, ctx.Err() //nolint:wrapcheck // the caller's own
		}
	}
}

// findInstance looks in a plain driver's list for the instance of an earlier create. It
// returns a create's result if there is one.
func (p *plainCall) findInstance(ctx context.Context) (*driverv1.Result, error) {
	machine := bus.MachineOf(p.req.Body)
	list := Request{
		Provider: p.req.Provider, Namespace: p.req.Namespace, Name: p.req.Name,
		OperationID: p.req.OperationID + ".look", Timeout: p.req.Timeout,
		Body: &driverv1.Envelope{Body: &driverv1.Envelope_List{
			List: &driverv1.ListRequest{Class: bus.ClassOf(p.req.Body)},
		}},
	}
	out, err := p.c.Call(ctx, list)
	if err != nil {
		return nil, err
	}
	for _, instance := range out.Result.GetList().GetInstances() {
		if instance.GetMachineUid() == machine.GetUid() ||
			instance.GetMachineUid() == "" && instance.GetMachineName() == machine.GetName() {
			return &driverv1.Result{Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{Instance: instance}}}, nil
		}
	}

	return nil, nil //nolint:nilnil // nil means that there is no instance
}
