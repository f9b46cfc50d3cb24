package bus

import (
	"context"
	"time"

	"google.golang.org/protobuf/proto"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// plain asks a driver that only answers: one request, one reply, no session. It
// is asked only when no full replica of the provider lives, because nothing tells
// whether it is alive: its silence means nothing before the operation's timeout,
// and then the outcome is unknown.
func (k *call) plain(ctx context.Context) error {
	if k.again {
		if _, err := k.outwaitPlain(ctx); err != nil {
			return err
		}
		if err := k.outwaitFull(ctx); err != nil {
			return err
		}
	}
	if len(k.c.replicas.live(k.req.Provider)) > 0 {
		// Gone and not yet known to be dead, about to go, or only just come.
		return k.notStarted("no replica of provider %s answers; waiting until it is known whether one lives", k.req.Provider)
	}
	if k.req.Look {
		return k.nobodyHas()
	}
	if err := k.markPlain(ctx); err != nil {
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
		// The look may have taken for longer than the mark was to last beyond it.
		if err := k.markPlain(ctx); err != nil {
			return err
		}
	}
	result, err := k.plainAsk(ctx)
	if err != nil {
		return err
	}
	k.out.Plain = true

	return k.settle(result)
}

// outwaitPlain waits until the deadlines of earlier attempts are over that a plain
// driver may have: it does not say, and it or whoever has taken its place would begin
// another one beside them. Who sent them may have been another manager. Where nothing
// tells whether a plain driver was ever asked, a replica with sessions that lives is
// taken for proof that none was.
func (k *call) outwaitPlain(ctx context.Context) (waited bool, err error) {
	for time.Now().Before(k.atPlain) && (k.claimed && !k.unsure || len(k.c.replicas.live(k.req.Provider)) == 0) {
		if !waited {
			k.waits(k.notStarted("a driver of provider %s that keeps no session may be at an earlier attempt until %s",
				k.req.Provider, k.atPlain.UTC().Format(time.RFC3339)))
		}
		waited = true
		if err := sleep(ctx, askAgain); err != nil {
			return waited, err
		}
	}

	return waited, nil
}

// outwaitFull waits, before a plain driver is asked for a create, until the calls that
// lost replicas may have at the cloud are over and to be seen in its lists, or a replica
// comes. Fencing does not end such calls, and a plain driver does not say what
// identifies its creates.
func (k *call) outwaitFull(ctx context.Context) error {
	if k.op != driverv1.Operation_OPERATION_CREATE || k.unclaimed {
		return nil
	}
	end := k.atFull.Add(k.c.replicas.settles(k.req.Provider))
	for told := false; time.Now().Before(end) && len(k.c.replicas.live(k.req.Provider)) == 0; told = true {
		if !told {
			k.waits(k.notStarted("a replica of provider %s is lost with an attempt, and only a driver that keeps no session is there: "+
				"that attempt's deadline and the settle time come first, at %s", k.req.Provider, end.UTC().Format(time.RFC3339)))
		}
		if err := sleep(ctx, askAgain); err != nil {
			return err
		}
	}

	return nil
}

func (k *call) noDriver() error {
	return k.noRoom("no driver for provider %s is on the bus (cluster %q): start one, or correct the class's provider",
		k.req.Provider, k.c.cfg.Cluster)
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
				k.hasRun() // settle knows whether it is over

				return h.result, nil
			case h.busy != nil:
				return nil, k.allBusy()
			case h.nobody:
				return nil, k.noDriver()
			}
		case <-limit.C:
			k.hasRun()
			k.atPlain, k.unsure = k.until, false

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
