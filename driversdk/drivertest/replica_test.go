package drivertest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const testProvider = "acme"

// A fault is the one thing that a replica does wrong, named after the clause that
// it breaks; empty for none.
type fault string

// A replica is a driver written without the SDK and without bus.Server: it knows
// the contract, and has a map for a cloud.
type replica struct {
	t     *testing.T
	nc    *nats.Conn
	fault fault
	plain bool
	id    string
	key   *bus.SealKey
	start time.Time

	mu        sync.Mutex
	instances map[string]*driverv1.Instance // by provider id
	made      int
	class     *driverv1.Class
	secrets   map[string]*driverv1.SecretContent
	pin       string
	epoch     uint64
	ops       map[string]*op
	denied    map[string]bool
	leader    string
	sequence  uint64

	lease string
	acked time.Time
	last  uint64
}

// An op is a mutation that runs or ran.
type op struct {
	env      *driverv1.Envelope
	machine  string
	reply    string
	result   *driverv1.Result
	claimSeq uint64
	lease    string
	fenced   bool
	cancel   chan struct{}
}

const testSlots = 4

func newReplica(t *testing.T, url string, f fault, plain bool) *replica {
	t.Helper()
	prefix := bus.InboxPrefix(testProvider)
	if f == "FETCH-1" {
		prefix = "_INBOX_elsewhere"
	}
	key, err := bus.NewSealKey()
	if err != nil {
		t.Fatal(err)
	}
	r := &replica{
		t: t, nc: bustest.Raw(t, url, nats.CustomInboxPrefix(prefix)), fault: f, plain: plain, id: nuid.Next(), key: key,
		start: time.Now(), instances: map[string]*driverv1.Instance{}, secrets: map[string]*driverv1.SecretContent{},
		ops: map[string]*op{}, denied: map[string]bool{}, lease: nuid.Next(),
	}
	tree, queue := "driver", "driver"
	if plain {
		tree = "plain"
	}
	if f == "SUBJECT-1" || f == "SUBJECT-3" {
		queue = "another"
	}
	r.subscribe(tree+"."+testProvider+".>", queue, r.onRequest)
	if !plain {
		if f != "SUBJECT-2" {
			r.subscribe("replica."+testProvider+"."+r.id+".>", "", r.onRequest)
		}
		r.subscribe("hello", "", r.onHello)
		r.subscribe("changed."+testProvider, "", r.onChanged)
		go r.beat()
	}

	return r
}

func (r *replica) subscribe(subject, queue string, f func(*nats.Msg)) {
	// Each message on a goroutine of its own: a request may wait for its class.
	handler := func(m *nats.Msg) { go f(m) }
	if _, err := r.nc.QueueSubscribe("mcm.v1.default."+subject, queue, handler); err != nil {
		r.t.Fatal(err)
	}
}

func (r *replica) beat() {
	tick := time.NewTicker(bus.SessionInterval)
	if r.fault == "SESSION-1" {
		tick.Reset(bus.SessionInterval * 3 / 2)
	}
	defer tick.Stop()
	for !r.nc.IsClosed() {
		r.renew()
		<-tick.C
	}
}

func (r *replica) renew() {
	r.mu.Lock()
	r.sequence++
	lease, expected := r.lease, r.last
	session := &driverv1.Session{
		Cluster: "default", Provider: testProvider, Replica: r.id, Sequence: r.sequence, StartedAt: timestamppb.New(r.start),
		Protocol: 1, Slots: testSlots, CreateIdentity: driverv1.CreateIdentity_CREATE_IDENTITY_UNIQUE_NAME,
		Capabilities: []driverv1.Operation{
			driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_DELETE,
			driverv1.Operation_OPERATION_STATUS, driverv1.Operation_OPERATION_LIST,
			driverv1.Operation_OPERATION_VALIDATE,
		},
		SessionId: lease, Leased: r.leased(), Epoch: r.epoch,
	}
	if r.fault == "SESSION-2" {
		session.Sequence = 7
	}
	r.mu.Unlock()
	sent := time.Now()
	m := &nats.Msg{Subject: "mcm.v1.default.session." + testProvider + "." + r.id, Header: nats.Header{
		headerExpected: {strconv.FormatUint(expected, 10)}, headerTTL: {"3s"},
	}}
	if r.fault == "SESSION-3" {
		m.Header.Set(headerTTL, "60s")
	}
	m.Data, _ = proto.Marshal(&driverv1.Envelope{Replica: r.id, Body: &driverv1.Envelope_Session{Session: session}})
	answer, err := r.nc.RequestMsg(m, bus.SessionInterval/2)
	if err != nil {
		return
	}
	seq, conflict := ackOf(answer)
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case seq > 0:
		r.last, r.acked = seq, sent
	case conflict > 0 || strings.Contains(string(answer.Data), "last sequence: 0"):
		r.last = conflict
		if r.fault == "FENCE-1" {
			return // goes on as if nothing had happened
		}
		r.lease, r.acked = nuid.Next(), time.Time{}
		for _, o := range r.ops {
			o.fenced = true
		}
	}
}

// ackOf returns the sequence that was stored, or the one in the way.
func ackOf(m *nats.Msg) (seq, conflict uint64) {
	var ack struct {
		Sequence uint64 `json:"seq"`
		Error    struct {
			Description string `json:"description"`
		} `json:"error"`
	}
	if json.Unmarshal(m.Data, &ack) != nil {
		return 0, 0
	}
	text := ack.Error.Description
	conflict, _ = strconv.ParseUint(strings.TrimSpace(text[strings.LastIndexByte(text, ':')+1:]), 10, 64)

	return ack.Sequence, conflict
}

// leased tells whether the last acknowledged session is young. r.mu is held.
func (r *replica) leased() bool {
	held := time.Since(r.acked) < 1200*time.Millisecond
	if !held {
		for _, o := range r.ops {
			o.fenced = o.fenced || r.fault != "FENCE-2"
		}
	}

	return held
}

func (r *replica) onHello(m *nats.Msg) {
	env, err := bus.Decode(m.Data, "")
	if err != nil || r.fault == "HELLO-1" {
		return
	}
	r.mu.Lock()
	news := r.leader != env.GetHello().GetMcm()
	r.leader = env.GetHello().GetMcm()
	r.mu.Unlock()
	if news {
		r.renew()
	}
}

func (r *replica) onChanged(*nats.Msg) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fault != "CHANGED-1" {
		r.class, r.secrets = nil, map[string]*driverv1.SecretContent{}
	}
}

// send answers; what is wrong with frames is wrong here.
func (r *replica) send(reply, contentType string, req, frame *driverv1.Envelope) {
	frame.OperationId, frame.Attempt, frame.Replica = req.GetOperationId(), req.GetAttempt(), r.id
	switch r.fault {
	case "ENV-1":
		contentType = contentTypeJSON
	case "ENV-2":
		contentType = ""
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
		m.Header = nats.Header{headerContentType: {contentType}}
	}
	_ = r.nc.PublishMsg(m)
	if r.fault == "RESULT-1" && frame.GetResult() != nil {
		_ = r.nc.PublishMsg(m)
	}
}

func frameOf(code driverv1.Code, text string) *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Result{Result: resultOf(code, text)}}
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
	contentType := m.Header.Get(headerContentType)
	if m.Reply != "" && !strings.HasPrefix(m.Reply, "mcm.v1.default.reply."+testProvider+".") && r.fault != "SUBJECT-4" {
		return
	}
	env, err := bus.Decode(m.Data, contentType)
	if err != nil {
		if r.fault == "ENV-3" {
			_ = r.nc.Publish(m.Reply, nil)
		}

		return
	}
	switch verb := strings.Split(m.Subject, ".")[strings.Count("mcm.v1.c.replica.p.r.", ".")]; {
	case !r.plain && strings.Contains(m.Subject, ".replica.") && r.control(verb, m, env):
	case bus.Mutates(bus.OperationOf(env)):
		r.mutate(m.Reply, contentType, env)
	default:
		r.read(m.Reply, contentType, env)
	}
}

func (r *replica) read(reply, contentType string, env *driverv1.Envelope) {
	done := make(chan *driverv1.Result, 1)
	go func() { done <- r.do(env, nil) }()
	deadline := time.After(env.GetTimeout().AsDuration())
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

// control answers what is no operation.
func (r *replica) control(verb string, m *nats.Msg, env *driverv1.Envelope) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch verb {
	case "ops":
		id := env.GetOps().GetOperationId()
		answer := &driverv1.OpsResponse{}
		if o := r.ops[id]; o != nil {
			answer.Operations = []*driverv1.OperationState{{OperationId: id, Settled: o.result != nil}}
			answer.Result = o.result
		} else if r.fault != "OPS-1" {
			r.denied[fmt.Sprint(id, "/", env.GetAttempt())] = true
		}
		r.send(m.Reply, "", env, &driverv1.Envelope{Body: &driverv1.Envelope_OpsHeld{OpsHeld: answer}})
	case "ack":
		delete(r.ops, env.GetAcknowledge().GetOperationId())
	case "cancel":
		if o := r.ops[env.GetCancel().GetOperationId()]; o != nil {
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

// fetch asks the manager for the class and its secret, unless they are known.
func (r *replica) fetch(ref *driverv1.ClassReference) (*driverv1.Class, *driverv1.SecretContent, error) {
	r.mu.Lock()
	class, secret := r.class, r.secrets[ref.GetSecret().GetName()]
	r.mu.Unlock()
	same := func(a, b *driverv1.ObjectReference) bool { return a.GetResourceVersion() == b.GetResourceVersion() }
	if class == nil || r.fault != "REF-1" && !same(class.GetReference(), ref.GetClass()) {
		env, err := r.ask("class", &driverv1.Envelope{Body: &driverv1.Envelope_FetchClass{
			FetchClass: &driverv1.FetchClassRequest{Class: ref.GetClass()},
		}})
		if err != nil {
			return nil, nil, err
		}
		class = env.GetFetchedClass().GetClass()
	}
	if ref.GetSecret() != nil && (secret == nil || !same(secret.GetReference(), ref.GetSecret())) {
		var err error
		if secret, err = r.fetchSecret(ref); err != nil {
			return nil, nil, err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.class, r.secrets[ref.GetSecret().GetName()] = class, secret

	return class, secret, nil
}

func (r *replica) fetchSecret(ref *driverv1.ClassReference) (*driverv1.SecretContent, error) {
	nonce := []byte(nuid.Next())
	env, err := r.ask("secret", &driverv1.Envelope{Body: &driverv1.Envelope_FetchSecret{
		FetchSecret: &driverv1.FetchSecretRequest{Class: ref.GetClass(), Secret: ref.GetSecret(), Recipient: r.key.Public(), Nonce: nonce},
	}})
	if err != nil {
		return nil, err
	}
	sealed := env.GetFetchedSecret().GetSealed()
	r.mu.Lock()
	if r.pin == "" || r.fault == "FETCH-3" {
		r.pin = sealed.GetSender()
	}
	pin := r.pin
	r.mu.Unlock()
	secret := &driverv1.SecretContent{}
	if err := r.key.Open(sealed, pin, secret); err != nil {
		return nil, err
	}
	if !bytes.Equal(secret.GetNonce(), nonce) && r.fault != "FETCH-2" {
		return nil, fmt.Errorf("the secret answers another question")
	}

	return secret, nil
}

func (r *replica) ask(what string, env *driverv1.Envelope) (*driverv1.Envelope, error) {
	payload, err := proto.Marshal(env)
	if err != nil {
		return nil, err
	}
	m, err := r.nc.Request("mcm.v1.default.fetch."+testProvider+"."+what, payload, patience)
	if err != nil {
		return nil, err
	}

	return bus.Decode(m.Data, "")
}

func (r *replica) list() []*driverv1.Instance {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []*driverv1.Instance
	for _, i := range r.instances {
		all = append(all, i)
	}

	return all
}
