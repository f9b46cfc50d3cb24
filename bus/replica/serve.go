package replica

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"
	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/proto"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/fencing"
	"github.com/machinebus/machinebus/bus/internal/opstream"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// Timing of the answering side, from which that of the asking side follows.
const (
	// deferredAccept is how long a read may run before its replica sends accepted, so that
	// mcm can tell a slow answer from a dead replica.
	deferredAccept = 100 * time.Millisecond
	// ackWait is how long a stopping replica waits for mcm to acknowledge its results.
	ackWait = 2 * time.Second

	defaultDrainTimeout = 10 * time.Minute
	defaultHardStop     = 5 * time.Second
	defaultStuckAfter   = 10 * time.Second
)

// ErrLeft is wrapped by the error of a Run that ended while operations still ran, although
// their contexts were cancelled. Their outcome is unknown.
var ErrLeft = errors.New("operations still ran when the replica stopped")

// A Handler runs operations. Handle may be called from many goroutines, but runs
// at most one mutation of a machine at a time. It must return when ctx ends: one that does not is
// given up, see [Server.Stuck]. It may panic, which is answered as an internal error. After [Task.BeginMutation] the outcome of that, of no
// result, and of one that cannot be sent counts as unknown.
type Handler interface {
	Handle(ctx context.Context, t *Task) *driverv1.Result
}

// HandlerFunc lets a function be a [Handler].
type HandlerFunc func(ctx context.Context, t *Task) *driverv1.Result

// Handle calls f.
func (f HandlerFunc) Handle(ctx context.Context, t *Task) *driverv1.Result { return f(ctx, t) }

// A Task is one operation for a Handler.
type Task struct {
	// Cluster is the asking control plane.
	Cluster   string
	Operation driverv1.Operation
	// Request is the whole envelope; Handlers read it and must not change it.
	Request *driverv1.Envelope
	// TraceParent is the caller's span as a W3C traceparent header; empty if the operation
	// is not traced.
	TraceParent string

	worker *worker
	op     *operation
	ctx    context.Context //nolint:containedctx // the operation's, as Handle gets it
}

// Progress reports to mcm what the operation does, in one line without secrets. It never
// blocks and may be called often: only the newest line counts.
func (t *Task) Progress(message string) { t.worker.reportProgress(t.op, message) }

// BeginMutation must be called right before each call that changes something at the
// provider. It takes one round trip to NATS. It fails if the operation must not go on: it
// was cancelled, its deadline has passed, the replica has stopped, another replica has the
// operation, or the operations stream does not answer. After the first success a cancel
// no longer ends the operation's context: the effect of a call cut off halfway is unknown.
func (t *Task) BeginMutation() error { return t.worker.claims.mayBegin(t.ctx, t.op) }

// Claim returns the stream sequence of this attempt's newest record; 0 before the first,
// and for operations that change nothing.
func (t *Task) Claim() uint64 {
	t.worker.ops.mu.Lock()
	defer t.worker.ops.mu.Unlock()

	return t.op.claim
}

// A Config describes a replica.
type Config struct {
	// Provider is the value of MachineClass.provider; one subject token.
	Provider string
	// Clusters are the control planes to serve; none means "default".
	Clusters []string
	// Replica is unique among all running replicas, and not "plain", which is
	// reserved; empty picks one at random, which is right for everything but tests.
	Replica string
	// Version is the driver's own, SemVer.
	Version string
	// Hostname tells people where the replica runs.
	Hostname string
	// Slots is how many creates and initializes run at once; 0 means [DefaultSlots].
	// Deletes have as many slots of their own, and so have reads: neither waits behind
	// creates. So have requests that look at node groups, and those that change them.
	Slots int
	// CreateIdentity says what keeps Create from making a second instance.
	CreateIdentity driverv1.CreateIdentity
	// SettleTime is how long the provider's list may lag behind its effects.
	SettleTime time.Duration
	// Kind and APIVersions are those of the provider spec; empty for any.
	Kind        string
	APIVersions []string
	// Capabilities are the operations the Handler implements.
	Capabilities []driverv1.Operation
	// DrainTimeout is how long running operations get to finish once Run's
	// context ends, before their own contexts are cancelled; 0 means 10 minutes.
	DrainTimeout time.Duration
	// HardStop is how long operations get to return once their contexts are
	// cancelled, before they are left behind; 0 means 5 seconds.
	HardStop time.Duration
	// StuckAfter is how long after its deadline a Handle that ignores it is given up, see
	// [Server.Stuck]; 0 means 10 seconds.
	StuckAfter time.Duration
	// Seal seals for a control plane what only it may read of an outcome; nil, or
	// a nil box, leaves that out of what is stored. [bus.FetchClient.Seal] is one.
	Seal func(cluster string, m proto.Message) *driverv1.Sealed
	// OnChanged is called for each notice that a class or secret has a new
	// version; it must not block. May be nil.
	OnChanged func(cluster string, change *driverv1.Changed)
	// OnSettled is called after each operation, reads included, for metrics; it
	// must not block. May be nil.
	OnSettled func(op driverv1.Operation, code driverv1.Code, took time.Duration)
	// Fence says whether the replica obeys the fence, for tests of what that prevents.
	Fence fencing.Mode
	// Logger receives what the replica does; nil means the default.
	Logger *slog.Logger
}

// A part holds what all parts of a replica use.
type part struct {
	conn  bus.Wire
	cfg   *Config
	log   *slog.Logger
	stats *serviceStats
}

// A Server is one replica: the answering side of operations.
type Server struct {
	part

	replies  map[string]string // where replies may go, by cluster
	ops      *operations
	managers *managers
	claims   *claims
	out      *outbox
	beat     *heartbeat
	worker   *worker
}

// New checks the configuration and makes a replica; [Server.Run] makes it
// answer.
func New(conn bus.Wire, cfg Config, handler Handler) (*Server, error) {
	if len(cfg.Clusters) == 0 {
		cfg.Clusters = []string{"default"}
	}
	cfg.Logger = cmp.Or(cfg.Logger, slog.Default())
	cfg.Replica = cmp.Or(cfg.Replica, nuid.Next())
	cfg.Slots = cmp.Or(cfg.Slots, DefaultSlots())
	cfg.DrainTimeout = cmp.Or(cfg.DrainTimeout, defaultDrainTimeout)
	cfg.HardStop = cmp.Or(cfg.HardStop, defaultHardStop)
	cfg.StuckAfter = cmp.Or(cfg.StuckAfter, defaultStuckAfter)
	errs := []error{bus.ValidToken("provider", cfg.Provider), bus.ValidReplica(cfg.Replica)}
	for _, cluster := range cfg.Clusters {
		errs = append(errs, bus.ValidToken("cluster", cluster))
	}
	if cfg.Slots < 0 {
		errs = append(errs, fmt.Errorf("slots: %d is negative", cfg.Slots))
	}
	if len(cfg.Capabilities) == 0 {
		errs = append(errs, errors.New("capabilities: a replica needs at least one operation"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	log := cfg.Logger.With("replica", cfg.Replica, "provider", cfg.Provider)
	p := part{conn: conn, cfg: &cfg, log: log, stats: &serviceStats{ops: map[endpoint]micro.EndpointStats{}}}
	s := &Server{part: p, replies: map[string]string{}, ops: newOperations(cfg.Slots, log), managers: newManagers(log)}
	s.out = &outbox{part: p, ops: s.ops}
	s.claims = &claims{part: p, ops: s.ops, out: s.out, unfenced: cfg.Fence.Off(), highest: map[string]ackedClaim{}}
	s.beat = &heartbeat{
		part: p, started: time.Now(), ops: s.ops, managers: s.managers, claims: s.claims, renew: map[string]chan struct{}{},
	}
	s.worker = &worker{part: p, handler: handler, ops: s.ops, claims: s.claims, out: s.out, beat: s.beat}
	for _, cluster := range cfg.Clusters {
		s.replies[cluster] = bus.ReplyPrefix(cluster, cfg.Provider)
		s.beat.renew[cluster] = make(chan struct{}, 1)
	}

	return s, nil
}

// Replica returns the replica's id.
func (s *Server) Replica() string { return s.cfg.Replica }

// Refusal returns why the replica takes no work from managers that lead: they share no
// version of the protocol with it. It is nil if it takes work from all.
func (s *Server) Refusal() error { return s.managers.refusal() }

// Running is how many operations run at this moment, reads included.
func (s *Server) Running() int { return s.ops.countRunning() }

// Stuck counts the calls that have ignored their deadlines for longer than
// [Config.StuckAfter] and have not returned, by operation. Each was answered with
// DEADLINE_EXCEEDED. Until it returns it keeps its slot, and its machine from other
// mutations at this replica.
func (s *Server) Stuck() map[driverv1.Operation]int { return s.ops.stuckCalls() }

// Jammed returns an error when calls that ignore their deadlines have all slots for some
// operations, nil otherwise.
func (s *Server) Jammed() error { return s.ops.allSlotsStuck() }

// Run may be called once. It answers until ctx ends and then drains: it takes no more work, lets
// running operations finish for DrainTimeout, cancels what is left, and returns
// when all have returned and their results are sent. Those that have not within HardStop
// are left behind: then the error wraps [ErrLeft].
func (s *Server) Run(ctx context.Context) error {
	requests, rest, err := s.subscribe()
	if err != nil {
		for _, sub := range append(requests, rest...) {
			_ = sub.Unsubscribe() // the error that counts is the first
		}

		return err
	}
	defer s.claims.inquirer.Close()
	// The heartbeat outlives ctx: a draining replica is alive.
	beat, stopBeat := context.WithCancel(context.WithoutCancel(ctx))
	var loops sync.WaitGroup
	for _, cluster := range s.cfg.Clusters {
		loops.Go(func() { s.beat.publishSessions(beat, cluster) })
	}
	loops.Go(func() { every(beat, deferredAccept/2, s.worker.acceptSlowReads) })
	loops.Go(func() { every(beat, min(stuckCheck, s.cfg.StuckAfter), s.worker.giveUp) })
	announce := sync.OnceFunc(func() {
		s.log.Info("serving", "clusters", s.cfg.Clusters, "slots", s.cfg.Slots, "version", s.cfg.Version)
	})
	s.conn.OnUp(func() { announce(); s.beat.renewNow() })

	<-ctx.Done()
	err = s.drain(requests)
	stopBeat()
	loops.Wait()
	s.ops.stopBegins()
	for _, cluster := range s.cfg.Clusters {
		s.beat.publishSession(cluster, true)
	}
	for _, sub := range rest {
		_ = sub.Unsubscribe() // the connection closes next
	}

	return err
}

// subscribe returns the subscriptions that bring work, which go first when
// draining, and the others.
func (s *Server) subscribe() (requests, rest []bus.Subscription, err error) {
	if s.claims.inquirer, err = opstream.NewInquirer(s.conn); err != nil {
		return nil, nil, err
	}
	add := func(list *[]bus.Subscription, subject, queue string, f nats.MsgHandler) {
		if err != nil {
			return
		}
		var sub bus.Subscription
		if sub, err = s.conn.Subscribe(subject, queue, f); err == nil {
			*list = append(*list, sub)
		}
	}
	for _, cluster := range s.cfg.Clusters {
		add(&rest, bus.Pattern(cluster, bus.TreeReplica, s.cfg.Provider, s.cfg.Replica, ">"), "", s.onDirected)
		add(&rest, bus.Pattern(cluster, bus.TreeHello), "", func(m *nats.Msg) { s.onHello(cluster, m) })
		add(&rest, bus.Pattern(cluster, bus.TreeChanged, s.cfg.Provider), "", func(m *nats.Msg) { s.onChanged(cluster, m) })
		add(&requests, bus.Pattern(cluster, bus.TreeDriver, s.cfg.Provider, ">"), bus.DriverQueue, s.onRequest)
		if slices.Contains(s.cfg.Capabilities, driverv1.Operation_OPERATION_NODE_GROUPS) {
			add(&requests, bus.Pattern(cluster, bus.TreeNodeGroup, s.cfg.Provider, "*"), bus.DriverQueue, s.onRequest)
		}
	}
	d := &discovery{part: s.part, started: s.beat.started, protocols: s.managers.protocols, ops: s.ops}
	for subject, answer := range d.answers() {
		add(&rest, subject, "", answer)
	}

	return requests, rest, err
}
