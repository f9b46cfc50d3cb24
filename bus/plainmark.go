package bus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/types/known/timestamppb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// plainMark stands for a replica in the subject of the tombstone by which a manager
// tells its successors that a plain driver may be at work: such a driver has no session
// and claims nothing, and a replica that has may take its place. The record is there
// for longer than any operation's deadline that was sent under it.
const plainMark = "plain"

// validReplica checks a replica's id. One of the mark's name would write its sessions in
// the mark's place [SESSION-2].
func validReplica(id string) error {
	if id == plainMark {
		return fmt.Errorf("replica %q: the name is reserved, as it stands for drivers without sessions: choose another one, or none", id)
	}

	return ValidToken("replica", id)
}

func (c *Caller) markSubject(provider string) string {
	return wildcard(c.cfg.Cluster, TreeSession, provider, plainMark)
}

// recallPlain finds out whether attempts that another manager has made can be at a
// plain driver.
func (k *call) recallPlain(ctx context.Context) (done bool, err error) {
	provider := k.req.Provider
	found, err := k.c.ledger(provider).last(ctx, k.c.markSubject(provider))
	switch {
	case ctx.Err() != nil:
		return true, ctx.Err() //nolint:wrapcheck // the caller's own
	case err != nil:
		k.c.lost(provider, err)

		return true, k.notStarted("cannot tell whether a driver that keeps no session has the operation: %w", err)
	case found != nil:
		k.unsure = false

		return false, nil
	}
	// A mark may have been lost along with its stream, or there was no stream to write
	// it to: that nothing is there tells nothing until this one has outlived them.
	age, err := k.c.streams.ageOf(ctx, provider)
	takes := acceptBy + k.req.Timeout
	switch {
	case ctx.Err() != nil:
		return true, ctx.Err() //nolint:wrapcheck // the caller's own
	case err != nil:
		k.c.lost(provider, err)

		return true, k.notStarted("cannot tell whether the mark of a driver that keeps no session was lost: %w", err)
	case age >= takes:
		k.atPlain, k.unsure = time.Time{}, false
	default:
		k.atPlain = time.Now().Add(takes - age)
	}

	return false, nil
}

// markPlain makes sure, before a plain driver is asked for a mutation, that other
// managers know of it for as long as that may take. It fails when there is no plain
// driver: then nobody is to wait for one.
func (k *call) markPlain(ctx context.Context) error {
	takes := acceptBy + k.req.Timeout
	if !k.claimed || k.c.isMarked(k.req.Provider, time.Now().Add(takes)) {
		return nil
	}
	turn := k.c.turnToMark(k.req.Provider)
	select {
	case turn <- struct{}{}:
		defer func() { <-turn }()
	case <-ctx.Done():
		return ctx.Err() //nolint:wrapcheck // the caller's own
	}
	if k.c.isMarked(k.req.Provider, time.Now().Add(takes)) {
		return nil // by whoever had the turn before
	}
	there, err := k.plainListens(ctx)
	switch {
	case err != nil:
		return err
	case !there:
		return k.noDriver()
	}
	err = k.c.mark(ctx, k.req.Provider, takes)
	switch {
	case ctx.Err() != nil:
		return ctx.Err() //nolint:wrapcheck // the caller's own
	case err != nil:
		k.c.lost(k.req.Provider, err)

		return k.notStarted("cannot note that a driver without sessions is asked: %w", err)
	default:
		return nil
	}
}

// plainListens tells whether there is a plain driver, by a request that has no body:
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
		return there, nil
	case <-limit.C:
		return true, nil
	case <-ctx.Done():
		return false, ctx.Err() //nolint:wrapcheck // the caller's own
	}
}

func (c *Caller) isMarked(provider string, until time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()

	return !until.After(c.marked[provider])
}

// turnToMark holds one at a time: those that begin together need one mark.
func (c *Caller) turnToMark(provider string) chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.marking[provider] == nil {
		c.marking[provider] = make(chan struct{}, 1)
	}

	return c.marking[provider]
}

// unmark forgets a mark that was lost along with its stream.
func (c *Caller) unmark(provider string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.marked, provider)
}

// mark writes the record for twice as long as an operation takes, so that not each
// one needs a new one, and for no less than the record there is would have stayed: the
// manager before may have sent an operation that takes longer.
func (c *Caller) mark(ctx context.Context, provider string, takes time.Duration) error {
	subject, book, now := c.markSubject(provider), c.ledger(provider), time.Now()
	found, err := book.last(ctx, subject)
	if err != nil {
		return err
	}
	expected, life := uint64(0), 2*takes
	if found != nil {
		expected = found.sequence
		life = max(life, found.remains(now))
	}
	life = life.Truncate(time.Second) + time.Second // a TTL has whole seconds
	_, err = book.put(ctx, subject, &driverv1.Envelope{Body: &driverv1.Envelope_Tombstone{Tombstone: &driverv1.Tombstone{
		Cluster: c.cfg.Cluster, Provider: provider, Replica: plainMark, Epoch: c.cfg.Epoch(), WrittenAt: timestamppb.New(now),
	}}}, expected, life)
	if errors.Is(err, errConflict) {
		return fmt.Errorf("another manager does the same: %w", err)
	}
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.marked[provider] = now.Add(life)
	c.mu.Unlock()

	return nil
}

// remains is how long a mark stays from now on, as far as its writer's clock tells.
func (r *record) remains(now time.Time) time.Duration {
	written := r.envelope.GetTombstone().GetWrittenAt().AsTime()

	return min(r.ttl, written.Add(r.ttl).Sub(now))
}
