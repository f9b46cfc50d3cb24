package bus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// plainReplica stands for a plain driver in a claim: mcm claims for it.
const plainReplica = "plain"

// plainSeenFor is how long a plain driver that has answered is taken to be there.
const plainSeenFor = 30 * time.Second

// validReplica checks a replica's id. One name stands for drivers without sessions
// [SESSION-2].
func validReplica(id string) error {
	if id == plainReplica {
		return fmt.Errorf("replica %q: the name is reserved, as it stands for drivers without sessions: choose another one, or none", id)
	}

	return ValidToken("replica", id)
}

// plain asks a driver that only answers: one request, one reply, no session. It
// is asked only when no full replica of the provider lives, because nothing tells
// whether it is alive: its silence means nothing before the operation's timeout,
// and then the outcome is unknown. It claims nothing: for a mutation this side does,
// with a record that goes by itself once the operation's time is over.
func (k *call) plain(ctx context.Context) error {
	if err := k.noReplicaLives(); err != nil {
		return err
	}
	if !Mutates(k.op) {
		return k.plainSettle(ctx)
	}
	if k.c.plainUnseen(k.req.Provider) {
		there, err := k.plainListens(ctx)
		switch {
		case err != nil:
			return err
		case !there:
			return k.noDriver()
		}
	}
	if done, err := k.claimForPlain(ctx); done || err != nil {
		return err
	}
	if k.again && k.op == driverv1.Operation_OPERATION_CREATE {
		found, err := k.plainLook(ctx)
		switch {
		case ctx.Err() != nil:
			return ctx.Err() //nolint:wrapcheck // the caller's own
		case err != nil:
			// Whatever became of the look, it says nothing about the create.
			return timeoutErrorf("cannot tell whether an earlier create made an instance: %w", err)
		case found != nil:
			k.out.Result, k.out.Plain = found, true

			return nil
		}
		// The look may have taken as long as the claim was to last beyond it.
		if done, err := k.claimForPlain(ctx); done || err != nil {
			return err
		}
	}

	return k.plainSettle(ctx)
}

// plainSettle asks a plain driver and ends the call with its answer.
func (k *call) plainSettle(ctx context.Context) error {
	result, err := k.plainAsk(ctx)
	if err != nil {
		return err
	}
	k.out.Plain = true
	if result.GetOutcomeUnknown() {
		k.releasePlainClaim(ctx) // it has ended, and may be tried again at once
		k.ends()
	}

	return k.settle(result)
}

// noReplicaLives returns nil when no full replica of the provider is known.
func (k *call) noReplicaLives() error {
	if len(k.c.replicas.live(k.req.Provider)) > 0 {
		// Gone and not yet known to be dead, about to go, or only just come.
		return k.notStarted("no replica of provider %s answers; waiting until it is known whether one lives", k.req.Provider)
	}

	return nil
}

// claimForPlain claims the call's operation for a plain driver, which may be asked then.
// Done says that the call has ended.
func (k *call) claimForPlain(ctx context.Context) (done bool, err error) {
	for range claimLooks {
		switch d, err := k.consult(ctx); d {
		case isDone:
			return true, err
		case mayAttach:
			return true, k.notStarted("replica %s has the operation", k.target)
		default:
		}
		if err := k.outwaitOthers(ctx); err != nil {
			return true, err
		}
		if err := k.noReplicaLives(); err != nil {
			return true, err
		}
		if k.req.OnlyIfHeld || k.req.Look {
			return true, k.nobodyHas()
		}
		if k.ran > 0 || !k.earlierCreate.IsZero() {
			k.number, k.again = k.ran+1, true
		}
		// It is over, and to be seen in the cloud's lists, when the record goes.
		life := acceptBy + k.req.Timeout + k.c.replicas.settles(k.req.Provider)
		claimedAt := time.Now()
		sequence, err := k.writePlainClaim(ctx, driverv1.Claim_STATE_BEGUN, k.terms.GetSequence(), life)
		switch {
		case ctx.Err() != nil:
			return true, ctx.Err() //nolint:wrapcheck // the caller's own
		case errors.Is(err, errConflict):
			continue // a replica has come, or another manager leads
		case err != nil:
			k.c.lost(k.req.Provider, err)

			return true, k.notStarted("cannot claim the machine for a driver without sessions: %w", err)
		}
		k.plainClaim, k.plainClaimAt = sequence, claimedAt

		return false, nil
	}

	return true, k.notStarted("the claim on the machine changes all the time; looking again")
}

// writePlainClaim writes a claim for a plain driver in the place of the record with the
// expected sequence, which stays for so long; 0 is as long as any.
func (k *call) writePlainClaim(ctx context.Context, state driverv1.Claim_State, expected uint64, life time.Duration) (uint64, error) {
	subject, err := claimSubject(k.c.cfg.Cluster, k.req.Provider, MachineOf(k.req.Body).GetUid())
	if err != nil {
		return 0, err
	}
	if life > 0 {
		life = life.Truncate(time.Second) + time.Second // a TTL has whole seconds
	}

	return k.c.ledger(k.req.Provider).put(ctx, subject, &driverv1.Envelope{
		OperationId: k.req.OperationID, Attempt: k.number, Replica: plainReplica,
		Body: &driverv1.Envelope_Claim{Claim: &driverv1.Claim{
			OperationId: k.req.OperationID, Attempt: k.number, Operation: k.op, Namespace: k.req.Namespace, Name: k.req.Name,
			Provider: k.req.Provider, Replica: plainReplica, Epoch: k.c.cfg.Epoch(), State: state, ClaimedAt: timestamppb.Now(),
		}},
	}, expected, life)
}

// outwaitOthers waits, before a plain driver is asked for a create, until the calls of
// earlier attempts are over and to be seen in the cloud's lists, or a replica comes: a
// plain driver does not say what identifies its creates. Where the claim was lost along
// with its stream any mutation waits for their deadlines, as a plain driver may have one.
func (k *call) outwaitOthers(ctx context.Context) error {
	end := k.quietAt()
	switch {
	case !k.earlierCreate.IsZero():
		end = later(end, k.earlierCreate).Add(k.c.replicas.settles(k.req.Provider))
	case k.ran == 0, k.unclaimed:
		return nil
	case k.op == driverv1.Operation_OPERATION_CREATE:
		end = end.Add(k.c.replicas.settles(k.req.Provider))
	case k.terms.GetSequence() != 0:
		return nil
	}
	for said := false; time.Now().Before(end) && len(k.c.replicas.live(k.req.Provider)) == 0; said = true {
		if !said {
			k.waits(k.notStarted("an earlier attempt is lost, and only a driver without sessions is there: "+
				"that attempt's deadline and the settle time of provider %s come first, at %s", k.req.Provider, end.UTC().Format(time.RFC3339)))
		}
		if err := sleep(ctx, askAgain); err != nil {
			return err
		}
	}

	return nil
}

// plainListens reports whether there is a plain driver, by a request that has no body:
// whoever gets it answers that it does not know such [ENV-4]. One that does not answer
// is there as well.
func (k *call) plainListens(ctx context.Context) (there bool, err error) {
	subject, err := Subject{
		Cluster: k.c.cfg.Cluster, Tree: TreePlain, Provider: k.req.Provider,
		Verb: Verb(driverv1.Operation_OPERATION_STATUS), Namespace: k.req.Namespace, Name: k.req.Name,
	}.Build()
	if err != nil {
		k.sendErr = err

		return false, k.unsendable()
	}
	heard := make(chan bool, 1)
	reply, done := k.c.register(k.req.Provider, func(m *nats.Msg) {
		select {
		case heard <- !isNoResponders(m):
		default:
		}
	})
	defer done()
	if err := k.c.publish(subject, reply, &driverv1.Envelope{OperationId: nuid.Next(), Epoch: k.c.cfg.Epoch()}); err != nil {
		return false, k.down()
	}
	limit := time.NewTimer(acceptTimeout)
	defer limit.Stop()
	select {
	case there = <-heard:
		k.c.sawPlain(k.req.Provider, there)

		return there, nil
	case <-limit.C:
		return true, nil
	case <-ctx.Done():
		return false, ctx.Err() //nolint:wrapcheck // the caller's own
	}
}

// sawPlain notes whether a plain driver of a provider was there just now.
func (c *Caller) sawPlain(provider string, there bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if there {
		c.plainSeen[provider] = time.Now()
	} else {
		delete(c.plainSeen, provider)
	}
}

// plainUnseen reports whether no plain driver of a provider has answered of late.
func (c *Caller) plainUnseen(provider string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()

	return time.Since(c.plainSeen[provider]) > plainSeenFor
}

func (k *call) noDriver() error {
	return k.noRoom("no driver for provider %s is on the bus (cluster %q): start one, or correct the class's provider",
		k.req.Provider, k.c.cfg.Cluster)
}

// releasePlainClaim gives back a claim under which nothing runs, so that nobody waits for
// its end.
func (k *call) releasePlainClaim(ctx context.Context) {
	if k.plainClaim == 0 {
		return
	}
	if _, err := k.writePlainClaim(ctx, driverv1.Claim_STATE_RELEASED, k.plainClaim, 0); err != nil {
		k.log().Warn("the claim for a driver without sessions stays until the operation's time is over: it could not be given back", "err", err)
	}
	k.plainClaim = 0
}

// plainAsk sends one request to the plain tree and waits for its one reply.
func (k *call) plainAsk(ctx context.Context) (*driverv1.Result, error) {
	a := newAttempt(k.req.OperationID, k.number, TreePlain, "")
	unregister, err := k.send(a)
	defer unregister()
	switch {
	case err == nil:
	case k.unsent(err) == gotUnsendable:
		return nil, k.unsendable()
	default:
		return nil, k.down()
	}
	limit := time.NewTimer(k.req.Timeout)
	defer limit.Stop()
	for {
		select {
		case <-a.notify:
			h := a.heard()
			switch {
			case h.result != nil:
				k.taken = k.lastTry
				k.c.sawPlain(k.req.Provider, true)
				k.hasRun() // settle knows whether it is over

				return h.result, nil
			case h.busy != nil:
				k.releasePlainClaim(ctx)

				return nil, k.allBusy()
			case h.nobody:
				k.c.sawPlain(k.req.Provider, false)
				k.releasePlainClaim(ctx)

				return nil, k.noDriver()
			}
		case <-limit.C:
			k.hasRun()

			return nil, timeoutErrorf("the plain driver of provider %s did not answer within %s", k.req.Provider, k.req.Timeout)
		case <-ctx.Done():
			return nil, ctx.Err() //nolint:wrapcheck // the caller's own
		}
	}
}

// plainLook asks a plain driver's List for the instance that an earlier create
// may have made. It returns a create's result when there is one.
func (k *call) plainLook(ctx context.Context) (*driverv1.Result, error) {
	machine := MachineOf(k.req.Body)
	list := Request{
		Provider: k.req.Provider, Namespace: k.req.Namespace, Name: k.req.Name,
		OperationID: k.req.OperationID + ".look", Timeout: k.req.Timeout,
		Body: &driverv1.Envelope{Body: &driverv1.Envelope_List{
			List: &driverv1.ListRequest{Class: ClassOf(k.req.Body)},
		}},
	}
	out, err := k.c.Call(ctx, list)
	if err != nil {
		return nil, err
	}
	for _, instance := range out.Result.GetList().GetInstances() {
		if instance.GetMachineUid() != machine.GetUid() &&
			(instance.GetMachineUid() != "" || instance.GetMachineName() != machine.GetName()) {
			continue
		}
		found, ok := proto.Clone(instance).(*driverv1.Instance)
		if ok {
			return &driverv1.Result{Payload: &driverv1.Result_Create{
				Create: &driverv1.CreateResponse{Instance: found},
			}}, nil
		}
	}

	return nil, nil //nolint:nilnil // nothing was found, and that is no fault
}
