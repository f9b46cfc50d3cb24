// Package bench plays the manager's side of a bus, and keeps what it sees of one driver. The chapters of the conformance
// suite are written with it; no other package of the suite knows the wire.
package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/caller"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// OwnerUID is the uid of the control cluster that the suite plays.
const OwnerUID = "conformance"

// A Bench is the manager's side of the bus, and what came from one driver.
type Bench struct {
	Config
	Witness

	Fetches *Fetches
	// Plain: the driver sends no sessions. Else Target is the replica to check.
	Plain  bool
	Target string
	// Epoch is the one of the manager that leads.
	Epoch uint64

	conn      *bus.Conn
	caller    *caller.Caller // makes the operations stream
	announcer *bus.Announcer
	fetched   *nats.Subscription
	replies   string // prefix of reply subjects
	prefix    string // of machines' names
	close     []func()

	mu        sync.Mutex
	exchanges map[string]*Exchange // by reply subject
	sessions  map[string][]Session // by replica, newest last
	machines  []*Machine           // may have an instance
	claims    []Claimed
	made      int // machines so far

	everyMachine map[string]*Machine // of the run, by uid
	unclear      map[attempt]bool    // of creates; an instance of theirs may come later
}

// Open connects, waits for the driver and finds out what kind it is. The configuration has to be complete.
func Open(ctx context.Context, cfg Config) (*Bench, error) {
	var err error
	cfg.NATS.Name, cfg.NATS.FailFast, cfg.NATS.Logger = "driver-conformance", true, cfg.Logger
	cfg.NATS.InboxPrefix = bus.ManagerInboxPrefix
	b := &Bench{
		Config: cfg, prefix: "conformance-" + strings.ToLower(rand.Text()[:8]) + "-", Epoch: 1,
		exchanges: map[string]*Exchange{}, sessions: map[string][]Session{},
		everyMachine: map[string]*Machine{}, unclear: map[attempt]bool{},
	}
	b.replies = b.Below("reply." + b.Provider + "." + nuid.Next() + ".")
	if b.conn, err = bus.Connect(ctx, cfg.NATS); err != nil {
		return nil, err
	}
	b.close = append(b.close, b.conn.Close)
	fetchCtx, stop := context.WithCancel(context.WithoutCancel(ctx))
	b.close = append(b.close, stop)
	if b.announcer, err = bus.NewAnnouncer(b.conn, b.Cluster); err == nil {
		b.Fetches, err = newFetches(fetchCtx, cfg, b.conn.Client())
	}
	if err == nil {
		b.confidential = b.Fetches.confidential
		err = b.Run(ctx, func(c *Check) {
			c.listen()
			c.meet()
		})
	}
	if err != nil {
		b.Close()

		return nil, err
	}

	return b, nil
}

// Close leaves the bus.
func (b *Bench) Close() {
	for _, f := range slices.Backward(b.close) {
		f()
	}
}

// Below returns a subject of the control plane.
func (b *Bench) Below(rest string) string { return "mcm.v1." + b.Cluster + "." + rest }

// Subject is where a request about a machine goes: to the replica to check, or to a plain driver.
func (b *Bench) Subject(verb, name string) string {
	tree := "replica." + b.Provider + "." + b.Target
	if b.Plain {
		tree = "plain." + b.Provider
	}

	return b.Below(tree + "." + verb + "." + b.Class.Namespace + "." + name)
}

// Serves reports whether the driver's sessions name this capability.
func (b *Bench) Serves(op driverv1.Operation) bool {
	return !b.Plain && slices.Contains(b.Session().GetCapabilities(), op)
}

// listen plays the manager's side.
func (c *Check) listen() {
	c.Subscribe(c.replies+"*", "", c.onReply)
	c.Subscribe(c.Below("session."+c.Provider+".*"), "", c.onSession)
	c.Subscribe(c.Below("claim."+c.Provider+".*"), "", c.onClaim)
	if c.OtherCluster != "" {
		c.Subscribe("mcm.v1."+c.OtherCluster+".fetch."+c.Provider+".*", "", c.Fetches.onFetch)
		c.Subscribe("mcm.v1."+c.OtherCluster+".reply."+c.Provider+".*.*", "", c.onReply)
	}
	c.answerFetches()
	c.Stream.start()
}

// Subscribe has f called, on one goroutine, with what comes to a subject from the time it returns. An empty queue is none.
func (c *Check) Subscribe(subject, queue string, f nats.MsgHandler) *nats.Subscription {
	sub, err := c.conn.Client().QueueSubscribe(subject, queue, f)
	c.Must(err)
	ctx, cancel := context.WithTimeout(c.ctx, c.Patience)
	defer cancel()
	c.Must(c.conn.Flush(ctx))

	return sub
}

// Publish sends a message, with what is asked of the reply subject.
func (c *Check) Publish(m *nats.Msg) {
	if err := c.conn.Client().PublishMsg(m); err != nil {
		c.Failf("publish on %s: %w", m.Subject, err)
	}
}

// answerFetches has fetches of the control plane answered.
func (c *Check) answerFetches() {
	c.fetched = c.Subscribe(c.Below("fetch."+c.Provider+".*"), "", c.Fetches.onFetch)
}

// WithoutManager runs f while no manager is there to be asked for classes.
func (c *Check) WithoutManager(f func()) {
	c.Must(c.fetched.Unsubscribe())
	c.Fetches.Touch()
	defer c.answerFetches()
	f()
}

// meet waits for a full replica, or for a plain driver.
func (c *Check) meet() {
	started := time.Now()
	if !c.Poll(c.Wait, func() bool {
		if c.ChooseTarget() {
			return true
		}
		if time.Since(started) > 2*bus.SessionInterval && c.plainAnswers() { // a full one would have been heard by now
			c.Plain = true
		}

		return c.Plain
	}) {
		c.Failf("no driver of provider %q connected within %s (cluster %q): check that it runs with this NATS and this provider",
			c.Provider, c.Wait, c.Cluster)
	}
	if !c.Plain {
		c.Stream.Await()
	}
}

// plainAnswers reports whether a plain driver listens.
func (c *Check) plainAnswers() (is bool) {
	r := c.ListRequest()
	r.Subject = c.Below("plain." + c.Provider + ".list." + c.Class.Namespace + "." + c.Class.Name)
	err := c.Try(func() {
		f, _ := c.Send(r).Next(min(c.Timeout, c.Wait))
		is = f.GetResult() != nil
	})

	return err == nil && is
}

// ChooseTarget has a replica checked that is alive, if there is one.
func (b *Bench) ChooseTarget() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for replica, sessions := range b.sessions {
		last := sessions[len(sessions)-1]
		if !last.GetStopped() && !last.GetDraining() && time.Since(last.At) < 3*bus.SessionInterval {
			b.Target = replica
			b.Epoch = max(b.Epoch, last.GetEpoch())

			return true
		}
	}

	return false
}

// Restart has the driver's process end and start again; another replica is checked from then on.
func (c *Check) Restart() {
	old := c.Target
	c.Must(c.Process.Stop(c.ctx))
	c.Must(c.Process.Wait(c.ctx))
	c.Must(c.Process.Start(c.ctx))
	c.AwaitSuccessor(old)
}

// AwaitSuccessor waits for another replica after one that was stopped, and checks that from then on.
func (c *Check) AwaitSuccessor(old string) {
	last := func() Session {
		all := c.SessionsOf(old)

		return all[len(all)-1]
	}
	stopped := last()
	c.Within(min(c.Wait, c.Patience), "the driver, started again, sends sessions", func() bool {
		now := last() // the last sessions of the one that was stopped may still come
		if now.GetSequence() < stopped.GetSequence() || !now.GetStartedAt().AsTime().Equal(stopped.GetStartedAt().AsTime()) {
			c.Blamef("SESSION-2", "started again, the driver calls itself replica %q as before", old)

			return true
		}

		return c.ChooseTarget() && c.Target != old
	})
	c.Stream.Await()
}

// Hello announces another leading manager than any before, as changed.
func (c *Check) Hello(change func(*driverv1.Hello)) {
	hello := &driverv1.Hello{ClusterUid: OwnerUID, Epoch: c.Epoch, Key: c.Fetches.key.Public(), Mcm: "conformance-" + nuid.Next()}
	if change != nil {
		change(hello)
	}
	c.Must(c.announcer.Hello(hello))
}

// Changed announces that an object has changed.
func (c *Check) Changed(kind driverv1.Changed_Kind, ref *driverv1.ObjectReference) {
	c.Must(c.announcer.Changed(c.Provider, &driverv1.Changed{Kind: kind, Reference: ref}))
}

// queueRounds is how many requests are sent to see that a queue group shares them.
const queueRounds = 24

// Shared joins queue group "driver" of a tree, and fails unless each request reaches one member. Ask sends one. Behind has
// another one answered.
func (c *Check) Shared(tree string, behind func(), ask func() *Exchange) {
	behind() // so that the driver has what it needs for its answers
	var mu sync.Mutex
	ours := 0
	others := c.Subscribe(tree, bus.DriverQueue, func(*nats.Msg) {
		mu.Lock()
		defer mu.Unlock()
		ours++
	})
	defer func() { _ = others.Unsubscribe() }() // again, where the check has ended early
	var asked []*Exchange
	for range queueRounds {
		asked = append(asked, ask())
	}
	counts := func() (driver, other int) {
		for _, x := range asked {
			if frames, _, _ := x.Tally(); frames > 0 {
				driver++
			}
		}
		mu.Lock()
		defer mu.Unlock()

		return driver, ours
	}
	c.Eventually(fmt.Sprintf("each of %d requests is taken by the driver or by another member of queue group driver", queueRounds), func() bool {
		driver, other := counts()

		return driver+other >= queueRounds
	})
	c.Must(others.Unsubscribe())
	behind()         // by then the driver has all that it gets
	c.Pause(Silence) // for what must not come
	if driver, other := counts(); driver+other > queueRounds || other == 0 {
		c.Failf("of %d requests the driver answered %d and another member of queue group driver got %d: "+
			"the driver does not share the group", queueRounds, driver, other)
	}
}

// Elsewhere fails if the driver answers a request to a reply subject where its provider has no business. Behind has another
// one answered.
func (c *Check) Elsewhere(request func() Request, behind func()) {
	for what, reply := range map[string]string{
		"another provider's reply tree": c.Below("reply." + c.Provider + "-other.x." + nuid.Next()), "an inbox": "_INBOX." + nuid.Next(),
	} {
		sub, err := c.conn.Client().SubscribeSync(reply)
		c.Must(err)
		r := request()
		r.Reply = reply
		c.Send(r)
		behind()
		if _, err = sub.NextMsg(Silence); err == nil {
			c.Failf("a request was answered to %s", what)
		}
		if !errors.Is(err, nats.ErrTimeout) {
			c.Must(err)
		}
		c.Must(sub.Unsubscribe())
	}
}
