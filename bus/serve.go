package bus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/proto"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// Clocks of the answering side; those of the asking side follow from them.
const (
	// SessionInterval is the time between a replica's signs of life.
	SessionInterval = 500 * time.Millisecond
	// deferredAccept is how long a read may run before its replica says that it
	// has it, so that mcm can tell a slow answer from a dead replica.
	deferredAccept = 100 * time.Millisecond
	// ackWait is how long a stopping replica waits for mcm to have stored its
	// results.
	ackWait = 2 * time.Second
	// keptResults and keptFor bound the results kept for an mcm that is away.
	keptResults = 2048
	keptFor     = 24 * time.Hour

	defaultDrainTimeout = 10 * time.Minute
	defaultHardStop     = 5 * time.Second
	defaultStuckAfter   = 10 * time.Second
	defaultTimeout      = time.Minute
)

// ErrLeft is wrapped by the error of a Run at whose end operations still ran, although
// their contexts were cancelled: what comes of them is unknown.
var ErrLeft = errors.New("operations were left behind")

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

// A Task is one operation in a Handler's hands.
type Task struct {
	// Cluster is the control plane that asks.
	Cluster   string
	Operation driverv1.Operation
	// Request is the whole envelope; Handlers read it and must not change it.
	Request *driverv1.Envelope
	// TraceParent is the asker's span as a W3C traceparent header, empty when the
	// operation is not traced.
	TraceParent string

	server *Server
	held   *held
	ctx    context.Context //nolint:containedctx // the operation's, as Handle gets it
}

// Progress tells mcm what the operation is doing, in one line without secrets.
// It never blocks and may be called often: only the newest line counts.
func (t *Task) Progress(message string) { t.server.report(t.held, message) }

// BeginMutation is called right before each call that changes something at the
// provider, and takes one round trip to NATS. It fails when the operation must not go on:
// it was cancelled, its deadline has passed, the replica has stopped, another replica has
// the operation by now, or the operations stream does not answer. From the first success on a cancel
// comes too late and no longer ends the operation's context: what a provider made
// of a call cut off halfway nobody could tell.
func (t *Task) BeginMutation() error { return t.server.mayBegin(t.ctx, t.held) }

// A ServerConfig describes a replica.
type ServerConfig struct {
	// Provider is what MachineClass.provider says; one subject token.
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
	// NodeGroups answers requests about node groups; nil offers none.
	NodeGroups NodeGroupHandler
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
	// a nil box, leaves that out of what is stored. [FetchClient.Seal] is one.
	Seal func(cluster string, m proto.Message) *driverv1.Sealed
	// OnChanged is called for each notice that a class or secret has a new
	// version; it must not block. May be nil.
	OnChanged func(cluster string, change *driverv1.Changed)
	// OnSettled is called after each operation, reads included, for metrics; it
	// must not block. May be nil.
	OnSettled func(op driverv1.Operation, code driverv1.Code, took time.Duration)
	// Logger receives what the replica does; nil means the default.
	Logger *slog.Logger
}

// A Server is one replica: the answering side of operations.
type Server struct {
	conn    wire
	cfg     ServerConfig
	handler Handler
	log     *slog.Logger
	started time.Time
	stats   *serviceStats
	replies map[string]string // where replies may go, by cluster

	protocols protocols // that it speaks

	mu         sync.Mutex
	held       map[string]*held      // mutations running or not acknowledged, by cluster and operation id
	machines   map[string]*held      // running mutations, by cluster and machine uid
	reads      map[*held]struct{}    // running reads
	highest    map[string]ackedClaim // by cluster
	stuck      map[*held]struct{}    // of machines and reads, calls that were given up
	epochs     map[string]uint64     // highest epoch seen, by cluster
	leaders    map[string]string     // last hello's sender, by cluster
	strange    map[string]error      // why nothing is taken from a cluster's managers: the protocol
	denials    denials
	running    int // mutations that occupy a slot
	deleting   int // those of them that are deletes
	draining   bool
	sequence   uint64
	groupReads int  // requests about node groups that run and change nothing
	groupEdits int  // and those that do
	stopped    bool // nothing is begun any more
	unfenced   bool // for tests that want to see what fencing is good for

	groups    context.Context // of requests about node groups
	endGroups context.CancelFunc

	inquirer *inquirer
	renew    map[string]chan struct{} // asks for a session at once, by cluster

	sessionLog time.Time // when a session was last said not to be sent

	begunReads reads
	tasks      sync.WaitGroup // added to under mu while not draining
	acked      chan struct{}  // signals that a kept result went
}

// NewServer checks the configuration and makes a replica; [Server.Run] makes it
// answer.
func NewServer(conn *Conn, cfg ServerConfig, handler Handler) (*Server, error) {
	return newServer(conn, cfg, handler)
}

func newServer(conn wire, cfg ServerConfig, handler Handler) (*Server, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if len(cfg.Clusters) == 0 {
		cfg.Clusters = []string{"default"}
	}
	if cfg.Replica == "" {
		cfg.Replica = nuid.Next()
	}
	if cfg.Slots == 0 {
		cfg.Slots = DefaultSlots()
	}
	cfg.Capabilities = withNodeGroups(cfg.Capabilities, cfg.NodeGroups)
	if cfg.DrainTimeout == 0 {
		cfg.DrainTimeout = defaultDrainTimeout
	}
	if cfg.HardStop == 0 {
		cfg.HardStop = defaultHardStop
	}
	if cfg.StuckAfter == 0 {
		cfg.StuckAfter = defaultStuckAfter
	}
	errs := []error{ValidToken("provider", cfg.Provider), validReplica(cfg.Replica)}
	for _, cluster := range cfg.Clusters {
		errs = append(errs, ValidToken("cluster", cluster))
	}
	if cfg.Slots < 0 {
		errs = append(errs, fmt.Errorf("slots: %d is negative", cfg.Slots))
	}
	if len(cfg.Capabilities) == 0 {
		errs = append(errs, errors.New("a replica without capabilities has nothing to serve"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	s := &Server{
		conn: conn, cfg: cfg, handler: handler, started: time.Now(),
		log:     cfg.Logger.With("replica", cfg.Replica, "provider", cfg.Provider),
		replies: map[string]string{}, protocols: spoken,
		held:     map[string]*held{},
		machines: map[string]*held{},
		reads:    map[*held]struct{}{},
		stuck:    map[*held]struct{}{},
		highest:  map[string]ackedClaim{},
		epochs:   map[string]uint64{},
		leaders:  map[string]string{},
		strange:  map[string]error{},
		denials:  denials{},
		renew:    map[string]chan struct{}{},
		acked:    make(chan struct{}, 1),
		unfenced: unfencedBuild,
	}
	for _, cluster := range cfg.Clusters {
		s.replies[cluster] = replyPrefix(cluster, cfg.Provider)
		s.renew[cluster] = make(chan struct{}, 1)
	}
	s.stats = newServiceStats(s.endpoints())
	s.groups, s.endGroups = context.WithCancel(context.Background()) //nolint:forbidigo // they outlive Run's context: drain decides

	return s, nil
}

// Replica returns the replica's id.
func (s *Server) Replica() string { return s.cfg.Replica }

// Refusal returns why the replica takes no work from managers that lead: they share no
// version of the protocol with it. It is nil if it takes work from all.
func (s *Server) Refusal() error {
	s.mu.Lock()
	defer s.mu.Unlock()

	return errors.Join(slices.Collect(maps.Values(s.strange))...)
}

// Running is how many operations run at this moment, reads included.
func (s *Server) Running() int {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.running + len(s.reads)
}

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
	defer s.inquirer.close()
	// The heartbeat outlives ctx: a draining replica is alive.
	beat, stopBeat := context.WithCancel(context.WithoutCancel(ctx))
	var loops sync.WaitGroup
	for _, cluster := range s.cfg.Clusters {
		loops.Go(func() { s.heartbeat(beat, cluster) })
	}
	loops.Go(func() { s.acceptSlowReads(beat) })
	loops.Go(func() { s.giveUpStuck(beat) })
	announce := sync.OnceFunc(func() {
		s.log.Info("serving", "clusters", s.cfg.Clusters, "slots", s.cfg.Slots, "version", s.cfg.Version)
	})
	s.conn.OnUp(func() { announce(); s.renewNow() })

	<-ctx.Done()
	err = s.drain(requests)
	stopBeat()
	loops.Wait()
	s.stop()
	for _, sub := range rest {
		_ = sub.Unsubscribe() // the connection closes next
	}

	return err
}

// subscribe returns the subscriptions that bring work, which go first when
// draining, and the others.
func (s *Server) subscribe() (requests, rest []subscription, err error) {
	if s.inquirer, err = newInquirer(s.conn); err != nil {
		return nil, nil, err
	}
	add := func(list *[]subscription, subject, queue string, f nats.MsgHandler) {
		if err != nil {
			return
		}
		var sub subscription
		if sub, err = s.conn.subscribe(subject, queue, f); err == nil {
			*list = append(*list, sub)
		}
	}
	for _, cluster := range s.cfg.Clusters {
		add(&rest, wildcard(cluster, TreeReplica, s.cfg.Provider, s.cfg.Replica, ">"), "", s.onDirected)
		add(&rest, wildcard(cluster, TreeHello), "", s.onHello)
		add(&rest, wildcard(cluster, TreeChanged, s.cfg.Provider), "", s.onChanged)
		add(&requests, wildcard(cluster, TreeDriver, s.cfg.Provider, ">"), driverQueue, s.onRequest)
		if s.cfg.NodeGroups != nil {
			add(&requests, wildcard(cluster, TreeNodeGroup, s.cfg.Provider, "*"), driverQueue, s.onNodeGroup)
		}
	}
	for _, d := range s.discovery() {
		add(&rest, d.subject, "", d.answer)
	}

	return requests, rest, err
}

// drain takes no more work and waits for what runs; it fails when some of it was left
// behind.
func (s *Server) drain(requests []subscription) error {
	s.mu.Lock()
	s.draining = true
	running := s.running + len(s.reads) + s.groupReads + s.groupEdits
	s.mu.Unlock()
	s.log.Info("draining: no new operations", "running", running, "timeout", s.cfg.DrainTimeout)
	s.renewNow()
	for _, sub := range requests {
		// What has come already is answered busy; Unsubscribe would lose it.
		if sub.Drain() != nil {
			_ = sub.Unsubscribe() // not connected: nothing comes either
		}
	}

	done := make(chan struct{})
	go func() {
		s.tasks.Wait()
		close(done)
	}()
	var left error
	soft := time.NewTimer(s.cfg.DrainTimeout)
	defer soft.Stop()
	select {
	case <-done:
	case <-soft.C:
		s.log.Warn("drain timeout: cancelling what still runs", "operations", s.cancelAll())
		hard := time.NewTimer(s.cfg.HardStop)
		defer hard.Stop()
		select {
		case <-done:
		case <-hard.C:
			left = fmt.Errorf("%w: they ignored their cancelled contexts for %s", ErrLeft, s.cfg.HardStop)
		}
	}
	s.awaitAcks()
	if stuck := s.stuckCalls(); left == nil && stuck > 0 {
		left = fmt.Errorf("%w: %d calls ignored their deadlines", ErrLeft, stuck)
	}

	return left
}

// awaitAcks gives mcm a moment to store the last results that are gone with this
// process: those that the operations stream does not have.
func (s *Server) awaitAcks() {
	limit := time.NewTimer(ackWait)
	defer limit.Stop()
	for {
		left := 0
		s.mu.Lock()
		for _, h := range s.held {
			if h.result != nil && !h.stored {
				left++
			}
		}
		s.mu.Unlock()
		if left == 0 || !s.conn.Up() {
			return
		}
		select {
		case <-s.acked:
		case <-limit.C:
			s.log.Info("leaving with results that mcm did not acknowledge; it will ask another replica", "results", left)

			return
		}
	}
}

// cancelAll cancels what runs, and names the mutations among it.
func (s *Server) cancelAll() []string {
	s.endGroups()
	s.mu.Lock()
	defer s.mu.Unlock()
	var ids []string
	for _, h := range s.machines {
		h.cancel()
		ids = append(ids, h.id)
	}
	for h := range s.reads {
		h.cancel()
	}
	slices.Sort(ids)

	return ids
}

// acceptSlowReads tells mcm who has a read that takes its time. One scan for
// all is cheaper than a timer for each.
func (s *Server) acceptSlowReads(ctx context.Context) {
	tick := time.NewTicker(deferredAccept / 2)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			var slow []*held
			s.mu.Lock()
			for h := range s.reads {
				if !h.accepted && now.Sub(h.started) > deferredAccept {
					h.accepted = true
					slow = append(slow, h)
				}
			}
			s.mu.Unlock()
			for _, h := range slow {
				s.send(h, acceptedFrame())
			}
		}
	}
}
