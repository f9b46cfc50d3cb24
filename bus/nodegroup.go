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

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

const (
	// nodeGroupCaller stands for whoever asks about node groups in reply subjects.
	// It is the same for all, so that a gateway may be given leave to hear the
	// answers to gateways and no others.
	nodeGroupCaller = "autoscaler"
	// nodeGroupSilence is how long one replica may take to answer before another one is
	// sent the same request, nodeGroupTries how many may get it.
	nodeGroupSilence = 2 * time.Second
	nodeGroupTries   = 3
	// nodeGroupPause is the time until another one is asked after two had no room for a
	// request; it doubles up to nodeGroupPauseMax.
	nodeGroupPause    = 150 * time.Millisecond
	nodeGroupPauseMax = 1200 * time.Millisecond
	// providerKept is how long a provider counts that is not heard of.
	providerKept = time.Hour
)

// Verbs of TreeNodeGroup.
const (
	nodeGroupGroups    = "groups"
	nodeGroupInstances = "instances"
	nodeGroupResize    = "resize"
	nodeGroupDelete    = "delete"
)

// NodeGroupVerb returns how a subject calls what an envelope asks for, and whether
// that changes something; "" when it asks for nothing this version knows.
func NodeGroupVerb(env *nodegroupv1.Envelope) (verb string, changes bool) {
	switch env.GetBody().(type) {
	case *nodegroupv1.Envelope_Groups:
		return nodeGroupGroups, false
	case *nodegroupv1.Envelope_Instances:
		return nodeGroupInstances, false
	case *nodegroupv1.Envelope_Resize:
		return nodeGroupResize, true
	case *nodegroupv1.Envelope_Delete:
		return nodeGroupDelete, true
	default:
		return "", false
	}
}

// AboutNodeGroups tells whether what a subject carries is an Envelope of
// machinebus.nodegroup.v1; all others of machinebus carry one of
// machinebus.driver.v1, or nothing.
func (s Subject) AboutNodeGroups() bool {
	return s.Tree == TreeNodeGroup || s.Tree == TreeReply && s.Caller == nodeGroupCaller
}

// A NodeGroupClient asks drivers about the node groups of their clouds. It is safe
// for concurrent use.
type NodeGroupClient struct {
	conn    *Conn
	cluster string
	log     *slog.Logger
	up      func() bool
	stops   []func()

	mu        sync.Mutex
	providers map[string]time.Time      // when a session of each was last heard
	waiting   map[string]chan *nats.Msg // by reply subject
}

// NewNodeGroupClient starts to listen for replicas and answers; Close ends it. A
// nil logger means the default.
func NewNodeGroupClient(conn *Conn, cluster string, log *slog.Logger) (*NodeGroupClient, error) {
	if err := ValidToken("cluster", cluster); err != nil {
		return nil, err
	}
	if log == nil {
		log = slog.Default()
	}
	c := &NodeGroupClient{
		conn: conn, cluster: cluster, log: log, up: conn.Up,
		providers: map[string]time.Time{}, waiting: map[string]chan *nats.Msg{},
	}
	stop, err := conn.watch(Pattern(cluster, TreeReply, "*", nodeGroupCaller, "*"), c.onReply)
	if err != nil {
		return nil, err
	}
	c.stops = append(c.stops, stop)
	if stop, err = WatchSessions(conn, cluster, c.onSession); err != nil {
		c.Close()

		return nil, err
	}
	c.stops = append(c.stops, stop)

	return c, nil
}

// Close stops listening. Asks that still wait must be ended by their contexts.
func (c *NodeGroupClient) Close() {
	for _, stop := range c.stops {
		stop()
	}
}

// Providers returns those of which a replica that serves node groups was heard of in
// the last hour, sorted. Whether one lives now, asking tells. While the bus cannot be
// reached nobody is heard, and nobody forgotten.
func (c *NodeGroupClient) Providers() []string {
	up := c.up()
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.providers, func(provider string, heard time.Time) bool {
		gone := up && time.Since(heard) > providerKept
		if gone {
			c.log.Info("a provider that served node groups is not heard of any more: it is forgotten", "provider", provider)
		}

		return gone
	})

	return slices.Sorted(maps.Keys(c.providers))
}

func (c *NodeGroupClient) onSession(s *driverv1.Session) {
	if !slices.Contains(s.GetCapabilities(), driverv1.Operation_OPERATION_NODE_GROUPS) {
		return
	}
	c.mu.Lock()
	_, known := c.providers[s.GetProvider()]
	c.providers[s.GetProvider()] = time.Now()
	c.mu.Unlock()
	if !known {
		c.log.Info("a provider serves node groups", "provider", s.GetProvider())
	}
}

func (c *NodeGroupClient) onReply(m *nats.Msg) {
	c.mu.Lock()
	waiting := c.waiting[m.Subject]
	delete(c.waiting, m.Subject) // one answer counts
	c.mu.Unlock()
	select {
	case waiting <- m: // nil when nobody waits (any more, or in this process)
	default:
	}
}

// Ask has one replica of a provider answer a request, whose envelope needs no more
// than its body, until ctx ends, a minute at most. The error is an [*Error]:
// OriginDriver is a driver's refusal, OriginBus says that nothing was done,
// OriginTimeout that nobody can tell. While no answer comes the request is sent again,
// with its id: whoever served it before does not do so twice [RESIZE-4], [REMOVE-2].
// An answer to any of them counts, however late. While replicas have no room for it,
// which proves that nothing was done, it is sent again for as long as ctx lasts.
func (c *NodeGroupClient) Ask(ctx context.Context, provider string, body *nodegroupv1.Envelope) (*nodegroupv1.Envelope, error) {
	verb, changes := NodeGroupVerb(body)
	subject, err := Subject{Cluster: c.cluster, Tree: TreeNodeGroup, Provider: provider, Verb: verb}.Build()
	if err != nil {
		return nil, Errorf(driverv1.Code_CODE_INVALID_ARGUMENT, "ask about node groups: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, DefaultTimeout)
	defer cancel()
	w := &nodeGroupWish{
		client: c, provider: provider, subject: subject, verb: verb, changes: changes,
		id: nuid.Next(), body: body, answers: make(chan *nats.Msg, nodeGroupTries),
	}
	defer func() { c.forget(w.open...) }()

	return w.run(ctx)
}

// forget has answers that still come dropped.
func (c *NodeGroupClient) forget(replies ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, reply := range replies {
		delete(c.waiting, reply)
	}
}

// CheckNodeGroup holds a group to the contract, in a driver before it is sent and in
// the gateway, which serves many drivers, before it is believed.
func CheckNodeGroup(g *nodegroupv1.Group) error {
	lower, upper, capacity := g.GetMinSize(), g.GetMaxSize(), g.GetTemplate().GetCapacity()
	switch {
	case !validNodeGroupID(g.GetId()):
		return fmt.Errorf("id %q: want letters, digits and any of \"._/-\" [GROUP-7]", g.GetId())
	case lower < 0 || upper <= 0 || lower > upper:
		return fmt.Errorf("sizes %d to %d: want 0 <= min <= max and 0 < max [GROUP-8]", lower, upper)
	case g.GetTargetSize() < 0:
		return fmt.Errorf("target size %d is below zero [GROUP-9]", g.GetTargetSize())
	case g.GetTemplate() != nil && (capacity["cpu"] == "" || capacity["memory"] == ""):
		return errors.New("template without cpu or memory [GROUP-10]")
	default:
		return nil
	}
}

func validNodeGroupID(id string) bool {
	for _, c := range []byte(id) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '.', c == '_', c == '/', c == '-':
		default:
			return false
		}
	}

	return id != ""
}
