package caller

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/opstream"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// acceptTimeout is how long the first frame may take.
	acceptTimeout = 500 * time.Millisecond
	// overdueGrace is how long a call waits beyond the operation's timeout: the
	// replica's clock starts later than ours.
	overdueGrace = 5 * time.Second
)

// A Config configures the Caller of one control plane.
type Config struct {
	// Cluster is the control plane's name on the bus.
	Cluster string
	// Owner is the uid of the control cluster. Drivers record it with the instances that
	// they make. Empty means that they record none.
	Owner string
	// Epoch returns the current epoch; nil means that there are no epochs.
	Epoch func() uint64
	// Name is the caller's token in reply subjects; empty picks one at random. Callers of
	// the same name receive and ignore each other's answers. Set it where permissions
	// allow only this token.
	Name string
	// Operations configures operations streams, which mutations need. Nil means that the
	// Caller only reads, makes no streams and needs no inbox.
	Operations *StreamConfig
	// Key opens what replicas have sealed for this control plane; nil leaves the texts of
	// stored outcomes unread.
	Key *bus.SealKey
	// Logger receives log messages; nil means the default.
	Logger *slog.Logger
}

// A Caller runs operations at the driver replicas on the bus. It is safe for
// concurrent use.
type Caller struct {
	conn           bus.Wire
	cfg            Config
	log            *slog.Logger
	id             string
	since          atomic.Pointer[time.Time] // when the client last connected
	restart        atomic.Pointer[time.Time] // when it last connected to another server process; nil for never
	server         atomic.Pointer[string]    // id of the server process; nil before the first connection
	replicas       *replicas
	dropped        atomic.Uint64
	countsNoEpochs bool
	logReserved    sync.Once // logs once that a replica has a reserved name

	mu        sync.Mutex
	waiting   map[string]func(*nats.Msg) // by reply subject
	plainSeen map[string]time.Time       // when a plain driver last answered, by provider

	// The inquirer is nil without streams.
	inquirer *opstream.Inquirer
	behind   chan struct{} // signals that a session had a lower epoch than ours
	ahead    chan struct{} // signals that a session had a higher epoch than ours
	streams  *streams      // nil for none
	replies  bus.Subscription
	sessions bus.Subscription
	ctx      context.Context //nolint:containedctx // of goroutines that run until Close
	stop     context.CancelFunc
	closed   bool           // guarded by mu
	done     sync.WaitGroup // added to under mu while not closed
}

// New subscribes sessions and replies. Close ends it.
func New(conn bus.Wire, cfg Config) (*Caller, error) {
	id := cmp.Or(cfg.Name, nuid.Next())
	if err := errors.Join(bus.ValidToken("cluster", cfg.Cluster), bus.ValidToken("name", id)); err != nil {
		return nil, err
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	countsNoEpochs := cfg.Epoch == nil
	if countsNoEpochs {
		cfg.Epoch = func() uint64 { return 0 }
	}
	c := &Caller{
		conn: conn, cfg: cfg, log: cfg.Logger, id: id, countsNoEpochs: countsNoEpochs,
		replicas: newReplicas(), waiting: map[string]func(*nats.Msg){},
		plainSeen: map[string]time.Time{}, behind: make(chan struct{}, 1), ahead: make(chan struct{}, 1),
	}
	c.ctx, c.stop = context.WithCancel(context.Background()) //nolint:forbidigo // ended by Close
	if cfg.Operations != nil {
		c.streams = &streams{c: c, config: *cfg.Operations, seen: map[string]*stream{}}
	}
	c.reconnected()
	conn.OnUp(c.reconnected)
	var err error
	if c.streams != nil {
		if c.inquirer, err = opstream.NewInquirer(conn); err != nil {
			return nil, err
		}
	}
	// Replies come on the connection that publishes the requests: only then does the
	// server report that a subject has no subscriber.
	if c.replies, err = conn.Subscribe(bus.Pattern(cfg.Cluster, bus.TreeReply, "*", c.id, "*"), "", c.onReply); err != nil {
		return nil, err
	}
	c.sessions, err = conn.Subscribe(bus.Pattern(cfg.Cluster, bus.TreeSession, "*", "*"), "", bus.SessionHandler(c.onSession))
	if err != nil {
		return nil, err
	}
	c.spawn(func() { c.sweep(c.ctx) })

	return c, nil
}

// spawn runs f, which ends with c.ctx, unless the Caller is closed.
func (c *Caller) spawn(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.done.Go(f)
	}
}

func (c *Caller) onSession(s *driverv1.Session) {
	if s.GetReplica() == bus.PlainReplica {
		c.logReserved.Do(func() {
			c.log.Warn("a replica has a reserved name: its sessions are ignored and it gets no work; give it another name",
				"replica", s.GetReplica(), "provider", s.GetProvider())
		})

		return
	}
	c.replicas.onSession(s, time.Now())
	if why, first := c.replicas.refusalToLog(s); first {
		c.log.Error("a driver replica gets no work", "err", why)
	}
	switch own := c.cfg.Epoch(); {
	case s.GetEpoch() < own:
		signal(c.behind)
	case s.GetEpoch() > own:
		signal(c.ahead)
	}
	if c.streams != nil {
		c.streams.noteReported(c.streams.of(s.GetProvider()), s)
	}
}

// connectedSince returns since when sessions can arrive.
func (c *Caller) connectedSince() time.Time { return *c.since.Load() }

func (c *Caller) reconnected() {
	now := time.Now()
	c.since.Store(&now)
	if id := c.conn.ServerID(); id != "" {
		if before := c.server.Swap(&id); before != nil && *before != id {
			c.restart.Store(&now)
		}
	}
	if c.streams != nil {
		c.streams.checkAll()
	}
}

// Close ends the subscriptions. End waiting calls by their contexts.
func (c *Caller) Close() {
	_ = c.sessions.Unsubscribe() // fails only on a closed connection
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.stop()
	c.done.Wait()
	if c.inquirer != nil {
		c.inquirer.Close()
	}
	_ = c.replies.Unsubscribe() // as above
}

// Replicas returns the live replicas of all providers.
func (c *Caller) Replicas() []Replica { return c.replicas.list() }

// Room returns a channel that is closed when a replica of the provider may have room.
// Wait for it after an error for which [bus.NothingRan] holds, but not for ever: a
// driver without sessions gives no such sign.
func (c *Caller) Room(provider string) <-chan struct{} { return c.replicas.room(provider) }

// Behind gets a value when a session has a lower epoch than this manager's: the replica
// would still obey the manager before. It is for one reader.
func (c *Caller) Behind() <-chan struct{} { return c.behind }

// Ahead gets a value when a session has a higher epoch than this manager's: the replica
// refuses this manager's requests. It is for one reader.
func (c *Caller) Ahead() <-chan struct{} { return c.ahead }

// Dropped returns the number of frames that belonged to no running operation.
func (c *Caller) Dropped() uint64 { return c.dropped.Load() }

// leads reports whether this manager leads, or counts no epochs.
func (c *Caller) leads() bool { return c.countsNoEpochs || c.cfg.Epoch() > 0 }

// Up reports whether the client is connected to NATS.
func (c *Caller) Up() bool { return c.conn.Up() }

// sweep declares silent replicas dead. It does not count time in which this side could
// hear none: without a connection, or while this process was starved.
func (c *Caller) sweep(ctx context.Context) {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	last, deaf := time.Now(), false
	// Only the reconnect shows a loss shorter than a tick.
	var back atomic.Bool
	c.conn.OnUp(func() { back.Store(true) })
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := time.Now()
		elapsed := now.Sub(last)
		last = now
		switch {
		case !c.conn.Up():
			deaf = true
			c.replicas.extendLife(now, elapsed)
		case back.Swap(false) || deaf:
			// Reconnected: each replica gets a full death limit to send a session.
			deaf = false
			c.replicas.extendLife(now, deathLimit)
		case elapsed > starved:
			c.replicas.extendLife(now, elapsed)
		default:
			c.logDead(c.replicas.sweep(now))
		}
	}
}

// logDead logs which replicas count as dead, in few lines: anyone who may send sessions
// can invent thousands of replicas.
func (c *Caller) logDead(dead []string) {
	const few = 10
	for i, key := range dead {
		if i == few {
			c.log.Warn("more replicas are dead: they sent no session", "replicas", len(dead)-few)

			return
		}
		c.log.Warn("replica is dead: it sent no session", "replica", key, "limit", deathLimit)
	}
}

// register passes messages on a new reply subject to f.
func (c *Caller) register(provider string, f func(*nats.Msg)) (reply string, unregister func()) {
	reply = bus.ReplyPrefix(c.cfg.Cluster, provider) + c.id + "." + nuid.Next()
	c.mu.Lock()
	c.waiting[reply] = f
	c.mu.Unlock()

	return reply, func() {
		c.mu.Lock()
		delete(c.waiting, reply)
		c.mu.Unlock()
	}
}

func (c *Caller) onReply(m *nats.Msg) {
	c.mu.Lock()
	f := c.waiting[m.Subject]
	c.mu.Unlock()
	if f == nil {
		c.dropReply(m.Subject, "no call waits for it")

		return
	}
	f(m)
}

func (c *Caller) dropReply(subject, why string) {
	c.dropped.Add(1)
	c.log.Debug("reply dropped", "subject", subject, "why", why)
}

// publish sends a request whose answers come to reply. An empty traceParent adds no
// header.
func (c *Caller) publish(subject, reply, traceParent string, env *driverv1.Envelope) error {
	payload, err := bus.Encode(env, "")
	if err != nil {
		return err
	}
	m := &nats.Msg{Subject: subject, Reply: reply, Data: payload}
	if traceParent != "" {
		m.Header = nats.Header{bus.HeaderTraceParent: {traceParent}}
	}

	return c.conn.Publish(m)
}

// control sends a replica a control message, whose answer comes to reply if it has one.
func (c *Caller) control(provider, replica, verb, reply string, env *driverv1.Envelope) error {
	subject, err := bus.Subject{
		Cluster: c.cfg.Cluster, Tree: bus.TreeReplica, Provider: provider, Replica: replica, Verb: verb,
	}.Build()
	if err != nil {
		return err
	}
	env.Epoch = c.cfg.Epoch()

	return c.publish(subject, reply, "", env)
}

// Cancel asks the replica that has an operation to end it early. The operation's
// [Caller.Call] still returns its result. Cancel does nothing while no replica is known
// to have it, such as before [Request].OnAccepted: then call it again later.
func (c *Caller) Cancel(provider, operationID string) error {
	h, ok := c.replicas.holderOf(provider, operationID)
	if !ok {
		return nil
	}

	return c.cancel(provider, h.replica, operationID)
}

func (c *Caller) cancel(provider, replica, operationID string) error {
	return c.control(provider, replica, bus.VerbCancel, "", &driverv1.Envelope{
		OperationId: operationID,
		Body:        &driverv1.Envelope_Cancel{Cancel: &driverv1.Cancel{OperationId: operationID}},
	})
}

// Acknowledge lets a replica forget an operation whose outcome is stored.
func (c *Caller) Acknowledge(provider, replica, operationID string) error {
	return c.control(provider, replica, bus.VerbAcknowledge, "", &driverv1.Envelope{
		OperationId: operationID,
		Body:        &driverv1.Envelope_Acknowledge{Acknowledge: &driverv1.Acknowledge{OperationId: operationID}},
	})
}

// ask asks a replica about an operation. It returns nil if the replica does not answer
// in time. A replica that denies having the operation will not take this attempt, or an
// earlier one, afterwards.
func (c *Caller) ask(ctx context.Context, provider, replica, operationID string, attempt uint32) *driverv1.OpsResponse {
	got := make(chan *driverv1.OpsResponse, 1)
	reply, done := c.register(provider, func(m *nats.Msg) {
		env, err := bus.DecodeMessage(m)
		if err != nil || env.GetOpsHeld() == nil || env.GetReplica() != replica {
			return
		}
		select {
		case got <- env.GetOpsHeld():
		default:
		}
	})
	defer done()
	err := c.control(provider, replica, bus.VerbOps, reply, &driverv1.Envelope{
		OperationId: operationID, Attempt: attempt,
		Body: &driverv1.Envelope_Ops{Ops: &driverv1.OpsRequest{OperationId: operationID}},
	})
	if err != nil {
		return nil
	}
	limit := time.NewTimer(acceptTimeout)
	defer limit.Stop()
	select {
	case answer := <-got:
		c.replicas.noteTrust(provider, replica, answers)

		return answer
	case <-limit.C:
		if c.conn.Up() {
			c.replicas.noteTrust(provider, replica, noAnswerLast)
		}
	case <-ctx.Done():
	}

	return nil
}

// sleep waits for d or until ctx ends.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err() //nolint:wrapcheck // the caller's own
	}
}

// signal puts a value into a channel with a buffer of one. It never blocks.
func signal(ch chan<- struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}
