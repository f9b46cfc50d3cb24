package e2e

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// hostileRole is the argument with which this test binary is a replica that
// breaks the contract. It uses nothing of ours but the messages.
const hostileRole = "hostile-replica"

// A hostileReplica is one of the process.
type hostileReplica struct {
	*manner

	nc                         *nats.Conn
	cluster, provider, replica string

	mu        sync.Mutex
	sequence  uint64
	asked     map[string]*driverv1.OperationState // by operation id
	overheard map[string]*driverv1.OperationState // of others' sessions
}

// A manner is one way to break the contract.
type manner struct {
	// request is called for what changes a machine, on a goroutine of its own.
	request func(h *hostileReplica, m *nats.Msg, env *driverv1.Envelope)
	// session may change what is said of the replica.
	session func(h *hostileReplica, s *driverv1.Session)
	// beat is called with each sign of life.
	beat func(h *hostileReplica)
	// holds: it says that it has what it was asked for, which mcm has to believe.
	holds bool
}

// manners are all there are, by the name of the provider.
var manners = map[string]*manner{
	"silent":  {},
	"twice":   {request: (*hostileReplica).answerTwice},
	"wrong":   {request: (*hostileReplica).answerWrongly},
	"endless": {request: (*hostileReplica).goOn, session: (*hostileReplica).listAsked, holds: true},
	"flood":   {request: (*hostileReplica).flood, beat: (*hostileReplica).inventReplicas},
	"huge":    {request: (*hostileReplica).answerHugely},
	"liar":    {request: (*hostileReplica).refuse, session: (*hostileReplica).lie},
}

func hostileManners() iter.Seq[string] { return maps.Keys(manners) }

func hostileHolds(name string) bool { return manners[name].holds }

// runHostile is the process: NATS's URL, the control plane, the manner.
func runHostile(args []string) error {
	const want = 3
	if len(args) != want || manners[args[2]] == nil {
		return fmt.Errorf("arguments %q: want NATS's URL, a cluster and one of %q", args, slices.Sorted(hostileManners()))
	}
	nc, err := nats.Connect(args[0], nats.MaxReconnects(-1))
	if err != nil {
		return err
	}
	h := &hostileReplica{
		manner: manners[args[2]], nc: nc, cluster: args[1], provider: args[2], replica: "hostile-" + args[2],
		asked: map[string]*driverv1.OperationState{}, overheard: map[string]*driverv1.OperationState{},
	}
	for subject, queue := range map[string]string{
		h.subject("driver") + ".>":                                   "driver",
		h.subject("replica", h.replica) + ".>":                       "",
		strings.TrimSuffix(h.subject("session"), h.provider) + "*.*": "",
	} {
		if _, err := nc.QueueSubscribe(subject, queue, h.onMessage); err != nil {
			return err
		}
	}
	for beat := time.NewTicker(500 * time.Millisecond); ; <-beat.C {
		h.live(h.replica)
		if h.beat != nil {
			h.beat(h)
		}
	}
}

func (h *hostileReplica) subject(tree string, more ...string) string {
	return strings.Join(append([]string{"mcm.v1", h.cluster, tree, h.provider}, more...), ".")
}

// live says that a replica lives.
func (h *hostileReplica) live(replica string) {
	h.mu.Lock()
	h.sequence++
	s := &driverv1.Session{
		Cluster: h.cluster, Provider: h.provider, Replica: replica, Sequence: h.sequence, Protocol: 1, Slots: 8,
		CreateIdentity: driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN,
	}
	for number := range driverv1.Operation_name {
		s.Capabilities = append(s.Capabilities, driverv1.Operation(number))
	}
	if h.session != nil {
		h.session(h, s)
	}
	h.mu.Unlock()
	h.publish(h.subject("session", replica), &driverv1.Envelope{Replica: replica, Body: &driverv1.Envelope_Session{Session: s}})
}

func (h *hostileReplica) publish(subject string, env *driverv1.Envelope) {
	payload, err := proto.Marshal(env)
	if err == nil {
		err = h.nc.Publish(subject, payload)
	}
	if err != nil && !errors.Is(err, nats.ErrReconnectBufExceeded) {
		fmt.Fprintln(os.Stderr, "publish:", err)
	}
}

// reply sends frames as they should be, in the order given.
func (h *hostileReplica) reply(m *nats.Msg, env *driverv1.Envelope, frames ...*driverv1.Envelope) {
	for _, f := range frames {
		f.OperationId, f.Attempt, f.Replica = env.GetOperationId(), env.GetAttempt(), h.replica
		h.publish(m.Reply, f)
	}
}

func (h *hostileReplica) onMessage(m *nats.Msg) {
	env := &driverv1.Envelope{}
	if err := proto.Unmarshal(m.Data, env); err != nil {
		return
	}
	machine, op := hostileTarget(env)
	if s := env.GetSession(); s.GetReplica() != h.replica {
		note(h, h.overheard, s.GetOperations()...)
	}
	if machine == nil {
		return // it answers no question
	}
	fmt.Println(machine.GetName())
	note(h, h.asked, &driverv1.OperationState{
		OperationId: env.GetOperationId(), Attempt: env.GetAttempt(), Operation: op, Namespace: machine.GetNamespace(), Name: machine.GetName(),
	})
	if h.request != nil {
		go h.request(h, m, env)
	}
}

func note(h *hostileReplica, in map[string]*driverv1.OperationState, operations ...*driverv1.OperationState) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, op := range operations {
		in[op.GetOperationId()] = op
	}
}

// hostileTarget returns what a request would change; nil for nothing.
func hostileTarget(env *driverv1.Envelope) (*driverv1.Machine, driverv1.Operation) {
	switch body := env.GetBody().(type) {
	case *driverv1.Envelope_Create:
		return body.Create.GetMachine(), driverv1.Operation_OPERATION_CREATE
	case *driverv1.Envelope_Initialize:
		return body.Initialize.GetMachine(), driverv1.Operation_OPERATION_INITIALIZE
	case *driverv1.Envelope_Delete:
		return body.Delete.GetMachine(), driverv1.Operation_OPERATION_DELETE
	default:
		return nil, 0
	}
}

func hostileAccepted() *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Accepted{Accepted: &driverv1.Accepted{}}}
}

func hostileProgress(message string) *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Progress{Progress: &driverv1.Progress{Message: message}}}
}

func hostileFailure(message string) *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: failure(driverv1.Code_CODE_UNAVAILABLE, errors.New(message))}}
}

// answerTwice says that it failed, and then that it has made an instance.
func (h *hostileReplica) answerTwice(m *nats.Msg, env *driverv1.Envelope) {
	made := &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: &driverv1.Result{Payload: &driverv1.Result_Create{
		Create: &driverv1.CreateResponse{Instance: &driverv1.Instance{ProviderId: "virtual:///nothing", NodeName: "nothing"}},
	}}}}
	h.reply(m, env, hostileAccepted(), hostileFailure("no capacity"), hostileFailure("no capacity"), made)
}

// answerWrongly sends what belongs to other operations, attempts and replicas.
func (h *hostileReplica) answerWrongly(m *nats.Msg, env *driverv1.Envelope) {
	for _, f := range []*driverv1.Envelope{
		{OperationId: env.GetOperationId() + "0", Attempt: env.GetAttempt(), Replica: h.replica},
		{OperationId: env.GetOperationId(), Attempt: env.GetAttempt() + 1, Replica: h.replica},
		{OperationId: env.GetOperationId(), Attempt: env.GetAttempt()},
	} {
		f.Body = hostileFailure("of another operation").GetBody()
		h.publish(m.Reply, f)
	}
	if err := h.nc.Publish(m.Reply, []byte("this is no envelope")); err != nil {
		fmt.Fprintln(os.Stderr, "publish:", err)
	}
}

// goOn reports progress for ever.
func (h *hostileReplica) goOn(m *nats.Msg, env *driverv1.Envelope) {
	h.reply(m, env, hostileAccepted())
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for i := 0; ; i++ {
		<-tick.C
		h.reply(m, env, hostileProgress(fmt.Sprint("step ", i)))
	}
}

// listAsked says that all it was asked for runs. h.mu is held.
func (h *hostileReplica) listAsked(s *driverv1.Session) {
	s.Operations = slices.Collect(maps.Values(h.asked))
}

// flood sends so many frames that have nothing to do with anything, and never
// answers.
func (h *hostileReplica) flood(m *nats.Msg, env *driverv1.Envelope) {
	stranger := hostileProgress("hello")
	stranger.OperationId = "another"
	for range 20000 {
		h.publish(m.Reply, stranger)
		h.publish(m.Reply+"x", stranger)
	}
}

// inventReplicas has ever more replicas live, each for a moment.
func (h *hostileReplica) inventReplicas() {
	const many = 200
	for range many {
		h.mu.Lock()
		name := fmt.Sprint(h.replica, "-", h.sequence)
		h.mu.Unlock()
		h.live(name)
	}
}

// answerHugely sends frames as large as NATS takes them.
func (h *hostileReplica) answerHugely(m *nats.Msg, env *driverv1.Envelope) {
	const space = 4 << 10
	text := strings.Repeat("x", int(h.nc.MaxPayload())-space)
	h.reply(m, env, hostileAccepted())
	for range 20 {
		h.reply(m, env, hostileProgress(text))
	}
	h.reply(m, env, hostileFailure(text))
}

// refuse says that it has no room.
func (h *hostileReplica) refuse(m *nats.Msg, env *driverv1.Envelope) {
	h.reply(m, env, &driverv1.Envelope{Body: &driverv1.Envelope_Busy{Busy: &driverv1.Busy{Reason: driverv1.BusyReason_BUSY_REASON_SLOTS}}})
}

// lie says that it runs what others run, in an epoch that never comes, and that it
// has all the room of the world. h.mu is held.
func (h *hostileReplica) lie(s *driverv1.Session) {
	s.Epoch, s.Slots = math.MaxUint64, math.MaxUint32
	s.SettleTime = &durationpb.Duration{Seconds: math.MaxInt32}
	for _, op := range h.overheard {
		claimed := proto.CloneOf(op)
		claimed.Settled, claimed.Fenced, claimed.Attempt = false, false, math.MaxUint32
		s.Operations = append(s.Operations, claimed)
	}
}
