package bus

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	nodegroupv1 "github.com/machinebus/machinebus/proto/machinebus/nodegroup/v1"
)

const (
	// nodeGroupCaller stands for whoever asks about node groups in reply subjects.
	// It is the same for all, so that a gateway may be given leave to hear the
	// answers to gateways and no others.
	nodeGroupCaller = "autoscaler"
	// nodeGroupSilence is how long one replica may take to answer before the same
	// request is sent again, nodeGroupTries how often it is sent at most.
	nodeGroupSilence = 2 * time.Second
	nodeGroupTries   = 3
)

// Verbs of TreeNodeGroup.
const (
	nodeGroupGroups    = "groups"
	nodeGroupInstances = "instances"
	nodeGroupResize    = "resize"
	nodeGroupDelete    = "delete"
)

// nodeGroupVerb returns how a subject calls what an envelope asks for, and whether
// that changes something; "" when it asks for nothing this version knows.
func nodeGroupVerb(env *nodegroupv1.Envelope) (verb string, changes bool) {
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
	stops   []func()

	mu        sync.Mutex
	providers map[string]bool
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
		conn: conn, cluster: cluster, log: log, providers: map[string]bool{}, waiting: map[string]chan *nats.Msg{},
	}
	stop, err := conn.watch(wildcard(cluster, TreeReply, "*", nodeGroupCaller, "*"), c.onReply)
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

// Providers returns those of which a replica that serves node groups was ever
// heard of, sorted. Whether one lives now, asking tells.
func (c *NodeGroupClient) Providers() []string {
	c.mu.Lock()
	defer c.mu.Unlock()

	return slices.Sorted(maps.Keys(c.providers))
}

func (c *NodeGroupClient) onSession(s *driverv1.Session) {
	if !slices.Contains(s.GetCapabilities(), driverv1.Operation_OPERATION_NODE_GROUPS) {
		return
	}
	c.mu.Lock()
	known := c.providers[s.GetProvider()]
	c.providers[s.GetProvider()] = true
	c.mu.Unlock()
	if !known {
		c.log.Info("a provider serves node groups", "provider", s.GetProvider())
	}
}

func (c *NodeGroupClient) onReply(m *nats.Msg) {
	c.mu.Lock()
	waiting := c.waiting[m.Subject]
	c.mu.Unlock()
	select {
	case waiting <- m: // nil when nobody waits (any more, or in this process)
	default:
	}
}

// Ask has one replica of a provider answer a request, whose envelope needs no more
// than its body, until ctx ends. The error is an [*Error]: OriginDriver is a
// driver's refusal, OriginBus says that nothing was done, OriginTimeout that nobody
// can tell. A lost answer is asked for again, with the request's id: whoever served
// it before does not do so twice [RESIZE-4], [REMOVE-2]. That the repeat is refused
// says nothing of what was sent before.
func (c *NodeGroupClient) Ask(ctx context.Context, provider string, body *nodegroupv1.Envelope) (*nodegroupv1.Envelope, error) {
	verb, changes := nodeGroupVerb(body)
	subject, err := Subject{Cluster: c.cluster, Tree: TreeNodeGroup, Provider: provider, Verb: verb}.Build()
	if err != nil {
		return nil, Errorf(driverv1.Code_CODE_INVALID_ARGUMENT, "ask about node groups: %w", err)
	}
	id, silent := nuid.Next(), false
	for range nodeGroupTries {
		answer, err := c.once(ctx, subject, provider, &nodegroupv1.Envelope{
			RequestId: id, Body: body.GetBody(), Timeout: durationpb.New(nodeGroupTimeout(ctx)),
			AcceptBy: timestamppb.New(time.Now().Add(acceptBy)),
		})
		switch {
		case answer != nil && !answer.GetRefused():
			if err := ErrorOf(answer.GetStatus()); err != nil && silent && changes {
				// The repeat may be refused because the first one was done.
				return nil, timeoutErrorf("no answer from provider %s to %s, and to the same again: %w", provider, verb, err)
			}

			return answer, ErrorOf(answer.GetStatus())
		case answer != nil:
			continue // another replica may have room
		case NothingRan(err) && !silent:
			return nil, err
		case OriginOf(err) == OriginTimeout:
			silent = true
		}
		if ctx.Err() != nil {
			break
		}
	}
	if silent {
		return nil, timeoutErrorf("no answer from provider %s to %s: whether it was done will show", provider, verb)
	}

	return nil, busErrorf("replicas of provider %s are busy or stopping; nothing was done", provider)
}

// once sends a request and waits for its answer.
func (c *NodeGroupClient) once(
	ctx context.Context, subject, provider string, req *nodegroupv1.Envelope,
) (*nodegroupv1.Envelope, error) {
	payload, err := proto.Marshal(req)
	if err != nil {
		return nil, Errorf(driverv1.Code_CODE_INVALID_ARGUMENT, "encode a request about node groups: %w", err)
	}
	reply := strings.Join([]string{root, c.cluster, string(TreeReply), provider, nodeGroupCaller, nuid.Next()}, ".")
	answers := make(chan *nats.Msg, 1)
	c.mu.Lock()
	c.waiting[reply] = answers
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.waiting, reply)
		c.mu.Unlock()
	}()
	if err := c.conn.publish(&nats.Msg{Subject: subject, Reply: reply, Data: payload}); err != nil {
		return nil, busErrorf("ask provider %s about node groups: %w", provider, err)
	}
	limit := time.NewTimer(nodeGroupSilence)
	defer limit.Stop()
	select {
	case m := <-answers:
		if isNoResponders(m) {
			return nil, busErrorf("no replica of provider %s that serves node groups is on the bus", provider)
		}
		answer := &nodegroupv1.Envelope{}
		if err := proto.Unmarshal(m.Data, answer); err != nil || answer.GetRequestId() != req.GetRequestId() {
			return nil, timeoutErrorf("the answer of provider %s cannot be read", provider)
		}

		return answer, nil
	case <-limit.C:
	case <-ctx.Done():
	}

	return nil, timeoutErrorf("provider %s is silent", provider)
}

// nodeGroupTimeout is what is left of a context's time, within reason.
func nodeGroupTimeout(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return min(time.Until(deadline), defaultTimeout)
	}

	return defaultTimeout
}
