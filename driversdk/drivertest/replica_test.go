package drivertest

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const testProvider = "acme"

const headerExpected = "Nats-Expected-Last-Subject-Sequence"

// otherCluster is the second control plane that replicas serve.
const otherCluster = "other"

// A fault is the one thing that a replica does wrong, named after the clause that
// it breaks; empty for none.
type fault string

// Traits are what replicas differ in.
type traits struct {
	fault    fault
	plain    bool
	identity driverv1.CreateIdentity // unspecified means unique_name
	sees     bool                    // it lists without asking for class or secret
	away     bool                    // it cannot reach its cloud
	cuts     bool                    // its creates are cut at the cloud, which makes the instances later
}

// A replica is a driver written without the SDK and without replica.Server: it knows
// the contract, and has maps for a cloud.
type replica struct {
	traits

	t     *testing.T
	nc    *nats.Conn
	cloud *cloud
	pools *pools
	id    string
	key   *bus.SealKey
	start time.Time

	running     sync.WaitGroup // mutations
	ended, gone chan struct{}  // closed when it sends no more sessions, and when it is off the bus

	mu                sync.Mutex
	caches            map[string]*cache // by control plane
	epoch             uint64
	ops               map[string]*op
	denied            map[string]denial
	leader            string
	strange           bool // the manager that leads speaks another protocol
	sequence          uint64
	draining, stopped bool
}

// An op is a mutation that runs or ran.
type op struct {
	cluster     string
	env         *driverv1.Envelope
	machine     string
	subject     []string // tokens: verb, namespace, name
	reply       string
	attempt     uint32 // whose frames are sent
	contentType string
	progress    string
	result      *driverv1.Result
	ended       time.Time
	claiming    bool
	writing     sync.Mutex // one write to the claim at a time
	firstClaim  uint64     // the sequences of what was written to it first and last
	claimSeq    uint64
	doubted     bool // the call of an earlier attempt may still run
	stored      bool // what came of it is where its claim was, or never will be
	known       bool // the manager has its result
	fenced      bool // another attempt has its claim's place
	over        bool // it may begin nothing any more
	askedAgain  bool // another attempt may be on its way
	atCloud     bool // it has begun
	cancel      chan struct{}
}

// A denial is an attempt that the replica said it does not hold.
type denial struct {
	attempt uint32
	at      time.Time
}

const testSlots = 4

func newReplica(t *testing.T, url string, tr traits, c *cloud) *replica {
	t.Helper()
	prefix := bus.InboxPrefix(testProvider)
	if tr.fault == "FETCH-1" {
		prefix = "_INBOX_elsewhere"
	}
	if tr.identity == driverv1.CreateIdentity_CREATE_IDENTITY_UNSPECIFIED {
		tr.identity = driverv1.CreateIdentity_CREATE_IDENTITY_UNIQUE_NAME
	}
	key, err := bus.NewSealKey()
	if err != nil {
		t.Fatal(err)
	}
	r := &replica{
		traits: tr, t: t, nc: bustest.Raw(t, url, nats.CustomInboxPrefix(prefix)), cloud: c, id: nuid.Next(), key: key,
		start: time.Now(), caches: map[string]*cache{}, ops: map[string]*op{}, denied: map[string]denial{},
		ended: make(chan struct{}), gone: make(chan struct{}),
	}
	tree, queue := "driver", "driver"
	if tr.plain {
		tree = "plain"
	}
	if tr.fault == "SUBJECT-1" || tr.fault == "SUBJECT-3" {
		queue = "another"
	}
	for _, cluster := range []string{"default", otherCluster} {
		r.subscribe(cluster, tree+"."+testProvider+".>", queue, r.onRequest)
		if tr.plain {
			continue
		}
		if tr.fault != "SUBJECT-2" {
			r.subscribe(cluster, "replica."+testProvider+"."+r.id+".>", "", r.onRequest)
		}
		groupQueue := "driver"
		if tr.fault == "GROUP-1" {
			groupQueue = "another"
		}
		r.subscribe(cluster, "nodegroup."+testProvider+".*", groupQueue, r.onGroup)
		r.subscribe(cluster, "hello", "", r.onHello)
		r.subscribe(cluster, "changed."+testProvider, "", r.onChanged)
	}
	r.pools = c.pools
	switch tr.fault {
	case "GROUP-4":
		r.pools = newPools(tr.fault)
	case "RESIZE-4/process":
		r.pools.forget()
	}
	if !tr.plain {
		go r.beat()
	}

	return r
}

func (r *replica) subscribe(cluster, subject, queue string, f func(*nats.Msg)) {
	// Each message on a goroutine of its own: a request may wait for its class.
	handler := func(m *nats.Msg) { go f(m) }
	if _, err := r.nc.QueueSubscribe("mcm.v1."+cluster+"."+subject, queue, handler); err != nil {
		r.t.Error(err)
	}
}

func clusterOf(m *nats.Msg) string { return strings.Split(m.Subject, ".")[2] }

// send answers; what is wrong with frames is wrong here.
func (r *replica) send(reply, contentType string, req, frame *driverv1.Envelope) {
	frame.OperationId, frame.Attempt, frame.Replica = req.GetOperationId(), req.GetAttempt(), r.id
	switch r.fault {
	case "ENV-1":
		contentType = bus.ContentTypeJSON
	case "ENV-2":
		contentType = ""
	case "ENV-2/failed":
		if frame.GetResult().GetStatus().GetCode() != driverv1.Code_CODE_OK {
			contentType = ""
		}
	case "ENV-5":
		frame.Attempt++
	case "ENV-7":
		frame.Replica = ""
	case "ACCEPT-1", "ACCEPT-2":
		if frame.GetAccepted() != nil {
			return
		}
	}
	m := &nats.Msg{Subject: reply}
	m.Data, _ = bus.Encode(frame, contentType)
	if contentType != "" {
		m.Header = nats.Header{bus.HeaderContentType: {contentType}}
	}
	_ = r.nc.PublishMsg(m)
	if r.fault == "RESULT-1" && frame.GetResult() != nil {
		_ = r.nc.PublishMsg(m)
	}
}

func frameOf(code driverv1.Code, text string) *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: resultOf(code, text)}}
}

// unknown marks a result whose effect nobody knows.
func unknown(r *driverv1.Result) *driverv1.Result {
	r.OutcomeUnknown = true

	return r
}

func resultOf(code driverv1.Code, text string) *driverv1.Result {
	return &driverv1.Result{Status: &driverv1.Status{Code: code, Message: text}}
}

func accepted() *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Accepted{Accepted: &driverv1.Accepted{}}}
}

func busy(reason driverv1.BusyReason) *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Busy{Busy: &driverv1.Busy{Reason: reason}}}
}

func (r *replica) onRequest(m *nats.Msg) {
	contentType, cluster := m.Header.Get(bus.HeaderContentType), clusterOf(m)
	if m.Reply != "" && !strings.HasPrefix(m.Reply, "mcm.v1."+cluster+".reply."+testProvider+".") && r.fault != "SUBJECT-4" {
		return
	}
	env, err := bus.Decode(m.Data, contentType)
	if err != nil {
		if r.fault == "ENV-3" {
			_ = r.nc.Publish(m.Reply, nil)
		}

		return
	}
	tokens := strings.Split(m.Subject, ".")[strings.Count("mcm.v1.c.driver.p.", "."):]
	directed := strings.Contains(m.Subject, ".replica.")
	if directed {
		tokens = tokens[1:]
	}
	switch {
	case !r.plain && directed && r.control(tokens[0], m, env):
	case bus.Mutates(bus.OperationOf(env)):
		r.mutate(&op{
			cluster: cluster, env: env, machine: bus.MachineOf(env).GetUid(), subject: tokens, reply: m.Reply,
			attempt: env.GetAttempt(), contentType: contentType, cancel: make(chan struct{}, 1), doubted: env.GetEarlierMayRun(),
		})
	default:
		r.read(cluster, m.Reply, contentType, env)
	}
}

func (r *replica) read(cluster, reply, contentType string, env *driverv1.Envelope) {
	done := make(chan *driverv1.Result, 1)
	go func() { done <- r.do(cluster, env, nil) }()
	deadline := time.After(r.timeoutOf(env))
	if r.fault == "RESULT-1" {
		deadline = nil
	}
	slow := time.After(100 * time.Millisecond)
	for {
		select {
		case result := <-done:
			r.send(reply, contentType, env, &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: result}})

			return
		case <-slow:
			if !r.plain {
				r.send(reply, contentType, env, accepted())
			}
		case <-deadline:
			r.send(reply, contentType, env, frameOf(driverv1.Code_CODE_DEADLINE_EXCEEDED, "too late"))

			return
		}
	}
}

// timeoutOf is how long an operation may take.
func (r *replica) timeoutOf(env *driverv1.Envelope) time.Duration {
	timeout := env.GetTimeout().AsDuration()
	if r.fault == "RESULT-1/late" {
		timeout += lateness + time.Second
	}

	return timeout
}

// control answers what is no operation.
func (r *replica) control(verb string, m *nats.Msg, env *driverv1.Envelope) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch verb {
	case "ops":
		id := env.GetOps().GetOperationId()
		answer := &driverv1.OpsResponse{}
		if o := r.ops[id]; o != nil {
			answer.Operations = []*driverv1.OperationState{{OperationId: id, Settled: o.result != nil, Fenced: o.fenced}}
			if r.counts(o) {
				answer.Result = o.result
			}
		}
		if o := r.ops[id]; o == nil && r.fault != "OPS-1" || o != nil && o.fenced && r.fault != "OPS-1/fenced" {
			r.denied[id] = denial{env.GetAttempt(), time.Now()}
		}
		r.send(m.Reply, "", env, &driverv1.Envelope{Body: &driverv1.Envelope_OpsHeld{OpsHeld: answer}})
	case "ack":
		if o := r.ops[env.GetAcknowledge().GetOperationId()]; o != nil {
			o.known = true
			r.forget(o)
		}
	case "cancel":
		if o := r.ops[env.GetCancel().GetOperationId()]; o != nil && !o.atCloud {
			select {
			case o.cancel <- struct{}{}:
			default:
			}
		}
	default:
		return false
	}

	return true
}
