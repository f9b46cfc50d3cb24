package driversdk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/optest"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// These tests run a replica by Serve on a real nats-server; the manager's side
// is a bare NATS client that speaks the contract, and the real fetch server.

const (
	testProvider = "acme"
	testCluster  = "default"
	patience     = 20 * time.Second // bounds every wait of a test; nothing takes that long
)

type testSpec struct {
	Size string            `json:"size"`
	Zone string            `json:"zone,omitempty"`
	Tags map[string]string `json:"tags,omitempty"`
}

func (s testSpec) Validate() error {
	if s.Size == "" {
		return fmt.Errorf("size is missing")
	}
	if s.Size == "panic" {
		panic("on purpose") //nolint:forbidigo // a driver that does
	}

	return nil
}

// testDriver is a Driver whose cloud is a list; a test replaces what it needs.
type testDriver struct {
	onCreate func(ctx context.Context, req *Request[testSpec]) (*Instance, error)
	onDelete func(ctx context.Context, req *Request[testSpec]) error

	mu        sync.Mutex
	instances []*Instance
	creates   int
	seen      []*Request[testSpec]
}

func (d *testDriver) Create(ctx context.Context, req *Request[testSpec]) (*Instance, error) {
	d.mu.Lock()
	d.creates++
	d.seen = append(d.seen, req)
	d.mu.Unlock()
	if d.onCreate != nil {
		return d.onCreate(ctx, req)
	}
	i := &Instance{
		ProviderID: "acme://" + req.Machine.Name, NodeName: req.Machine.Name,
		MachineName: req.Machine.Name, MachineUID: req.Machine.UID, Owner: req.Owner,
		Addresses: []Address{{Type: "InternalIP", Address: "10.0.0.1"}},
	}
	d.mu.Lock()
	d.instances = append(d.instances, i)
	d.mu.Unlock()

	return i, nil
}

func (d *testDriver) Delete(ctx context.Context, req *Request[testSpec]) error {
	if d.onDelete != nil {
		return d.onDelete(ctx, req)
	}

	return nil
}

func (d *testDriver) List(context.Context, *Class[testSpec]) ([]*Instance, error) {
	d.mu.Lock()
	defer d.mu.Unlock()

	return append([]*Instance{}, d.instances...), nil
}

// last returns the newest request that Create saw.
func (d *testDriver) last(t *testing.T) *Request[testSpec] {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.seen) == 0 {
		t.Fatal("the driver was not asked to create anything")
	}

	return d.seen[len(d.seen)-1]
}

// store is what a manager would read from its cluster.
type store struct {
	mu        sync.Mutex
	classes   map[string]*driverv1.Class
	secrets   map[string]*driverv1.SecretContent
	bootstrap map[string]string
	fetched   map[string]int
}

func (s *store) count(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fetched[what]++
}

func (s *store) counts() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()

	return maps.Clone(s.fetched)
}

func (s *store) setClass(name, version, spec string) *driverv1.ObjectReference {
	s.mu.Lock()
	defer s.mu.Unlock()
	ref := &driverv1.ObjectReference{Namespace: "ns", Name: name, Uid: "uid-" + name, ResourceVersion: version}
	s.classes[name] = &driverv1.Class{Reference: ref, Provider: testProvider, ProviderSpec: []byte(spec)}

	return ref
}

func (s *store) setSecret(name, version string, data map[string]string) *driverv1.ObjectReference {
	s.mu.Lock()
	defer s.mu.Unlock()
	ref := &driverv1.ObjectReference{Namespace: "ns", Name: name, Uid: "uid-" + name, ResourceVersion: version}
	content := &driverv1.SecretContent{Reference: ref, Data: map[string][]byte{}}
	for key, value := range data {
		content.Data[key] = []byte(value)
	}
	s.secrets[name] = content

	return ref
}

func (s *store) Class(_ context.Context, _ string, req *driverv1.FetchClassRequest) (*driverv1.Class, error) {
	s.count("class")
	s.mu.Lock()
	defer s.mu.Unlock()
	class, ok := s.classes[req.GetClass().GetName()]
	if !ok {
		return nil, bus.Errorf(NotFound, "no class %q", req.GetClass().GetName())
	}

	return proto.CloneOf(class), nil
}

func (s *store) Secret(_ context.Context, _ string, req *driverv1.FetchSecretRequest) (*driverv1.SecretContent, error) {
	s.count("secret")
	s.mu.Lock()
	defer s.mu.Unlock()
	secret, ok := s.secrets[req.GetSecret().GetName()]
	if !ok {
		return nil, bus.Errorf(NotFound, "no secret %q", req.GetSecret().GetName())
	}

	return proto.CloneOf(secret), nil
}

func (s *store) Bootstrap(_ context.Context, _ string, req *driverv1.FetchBootstrapRequest) (*driverv1.BootstrapContent, error) {
	s.count("bootstrap")
	s.mu.Lock()
	defer s.mu.Unlock()
	values := maps.Clone(s.bootstrap)
	values["<<MACHINE_NAME>>"] = req.GetMachine()

	return &driverv1.BootstrapContent{Values: values}, nil
}

// world is a bus with a manager's side and one replica.
type world struct {
	t     *testing.T
	nats  *embedded.Server
	nc    *nats.Conn
	ops   jetstream.Stream // with the claims
	store *store
	stats *prometheus.Registry
	next  atomic.Int64

	stop     context.CancelFunc
	replica  *process
	served   chan error
	sessions *nats.Subscription
}

func newBus(t *testing.T) *world {
	t.Helper()
	srv := bustest.Server(t, embedded.Options{})
	w := &world{t: t, nats: srv, stats: prometheus.NewRegistry(), store: &store{
		classes: map[string]*driverv1.Class{}, secrets: map[string]*driverv1.SecretContent{},
		bootstrap: map[string]string{}, fetched: map[string]int{},
	}}
	conn := bustest.Connect(t, bus.Config{URLs: []string{srv.URL()}})
	fetches, err := bus.ServeFetches(conn, testCluster, optest.NewKey(t), w.store, bustest.Quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(fetches.Stop)
	// A round trip: from here on the server knows who answers fetches.
	unwatch, err := bus.Watch(conn, "unused", func(string, string, map[string][]string, []byte) {})
	if err != nil {
		t.Fatal(err)
	}
	unwatch()
	w.nc = bustest.Raw(t, srv.URL())
	js, err := jetstream.New(w.nc)
	if err != nil {
		t.Fatal(err)
	}
	if w.ops, err = js.CreateStream(t.Context(), jetstream.StreamConfig{
		Name: bus.StreamName(testCluster, testProvider), Subjects: []string{claimSubject("*")}, MaxMsgsPerSubject: 1,
		Storage: jetstream.MemoryStorage,
	}); err != nil {
		t.Fatal(err)
	}
	if w.sessions, err = w.nc.SubscribeSync("mcm.v1." + testCluster + ".session." + testProvider + ".*"); err != nil {
		t.Fatal(err)
	}
	if err := w.nc.Flush(); err != nil {
		t.Fatal(err)
	}

	return w
}

// start serves d and returns when its replica takes operations.
func start(t *testing.T, d Driver[testSpec], change func(*Config)) *world {
	t.Helper()
	w := newBus(t)
	cfg := Config{
		Provider: testProvider, NATS: NATSConfig{URLs: []string{w.nats.URL()}}, Metrics: w.stats,
		Logger: bustest.Quiet(),
	}
	if change != nil {
		change(&cfg)
	}
	w.serve(d, cfg)

	return w
}

func (w *world) serve(d Driver[testSpec], cfg Config) {
	w.t.Helper()
	cfg, err := cfg.Complete()
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(w.t.Context())
	w.stop, w.served = stop, make(chan error, 1)
	w.replica = newProcess(cfg)
	go func() { w.served <- serve(ctx, w.replica, d) }()
	w.t.Cleanup(func() {
		stop()
		select {
		case <-w.served:
		case <-time.After(patience):
			w.t.Error("Serve did not return")
		}
	})
	w.session(func(*driverv1.Session) bool { return true })
}

// session waits for one that is as wanted.
func (w *world) session(wanted func(*driverv1.Session) bool) *driverv1.Session {
	w.t.Helper()
	deadline := time.Now().Add(patience)
	for time.Now().Before(deadline) {
		m, err := w.sessions.NextMsg(patience)
		if err != nil {
			w.t.Fatalf("waiting for a session: %v", err)
		}
		env, err := bus.Decode(m.Data, "")
		if err != nil {
			w.t.Fatal(err)
		}
		if s := env.GetSession(); wanted(s) {
			return s
		}
	}
	w.t.Fatal("no session was as wanted")

	return nil
}

func claimSubject(machine string) string {
	return "mcm.v1." + testCluster + ".claim." + testProvider + "." + machine
}

// claim returns the claim on a machine, nil for none, and its sequence.
func (w *world) claim(machine string) (*driverv1.Claim, uint64) {
	w.t.Helper()
	m, err := w.ops.GetLastMsgForSubject(w.t.Context(), claimSubject(machine))
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil, 0
	}
	if err != nil {
		w.t.Fatal(err)
	}
	env, err := bus.Decode(m.Data, "")
	if err != nil {
		w.t.Fatal(err)
	}

	return env.GetClaim(), m.Sequence
}

// An exchange is one request and its reply frames.
type exchange struct {
	w       *world
	sub     *nats.Subscription
	id      string
	machine string // uid, of mutations
}

func (w *world) ask(env *driverv1.Envelope) *exchange {
	w.t.Helper()

	return w.askTraced(env, "")
}

// askTraced asks as a manager does that traces the operation.
func (w *world) askTraced(env *driverv1.Envelope, traceParent string) *exchange {
	w.t.Helper()
	n := w.next.Add(1)
	op := bus.OperationOf(env)
	if env.OperationId == "" {
		env.OperationId = fmt.Sprintf("%s.%s.%d", bus.MachineOf(env).GetUid(), bus.Verb(op), n)
	}
	if env.Attempt == 0 {
		env.Attempt = 1
	}
	if env.Timeout == nil {
		env.Timeout = durationpb.New(patience)
	}
	var claimed string
	if bus.Mutates(op) {
		claimed = bus.MachineOf(env).GetUid()
		_, sequence := w.claim(claimed)
		env.ClaimTerms = &driverv1.ClaimTerms{Sequence: &sequence}
	}
	name := bus.MachineOf(env).GetName()
	if name == "" {
		name = "class"
	}
	reply := fmt.Sprintf("mcm.v1.%s.reply.%s.test.t%d", testCluster, testProvider, n)
	sub, err := w.nc.SubscribeSync(reply)
	if err != nil {
		w.t.Fatal(err)
	}
	payload, err := bus.Encode(env, "")
	if err != nil {
		w.t.Fatal(err)
	}
	subject := fmt.Sprintf("mcm.v1.%s.driver.%s.%s.ns.%s", testCluster, testProvider, bus.Verb(op), name)
	if env.GetNodeGroups() != nil {
		subject = fmt.Sprintf("mcm.v1.%s.nodegroup.%s.%s", testCluster, testProvider, bus.RequestVerb(env))
	}
	m := &nats.Msg{Subject: subject, Reply: reply, Data: payload}
	if traceParent != "" {
		m.Header = nats.Header{"traceparent": {traceParent}}
	}
	if err := w.nc.PublishMsg(m); err != nil {
		w.t.Fatal(err)
	}

	return &exchange{w: w, sub: sub, id: env.GetOperationId(), machine: claimed}
}

// frame returns the next reply frame.
func (e *exchange) frame() *driverv1.Envelope {
	e.w.t.Helper()
	m, err := e.sub.NextMsg(patience)
	if err != nil {
		e.w.t.Fatalf("waiting for a reply frame of %s: %v", e.id, err)
	}
	env, err := bus.Decode(m.Data, "")
	if err != nil {
		e.w.t.Fatal(err)
	}

	return env
}

// result returns what the exchange ends with, and acknowledges it.
func (e *exchange) result() *driverv1.Result {
	e.w.t.Helper()
	r, replica := e.end()
	e.w.directed(replica, "ack", "", &driverv1.Envelope{
		Body: &driverv1.Envelope_Acknowledge{Acknowledge: &driverv1.Acknowledge{OperationId: e.id}},
	})

	// Requests come by another subscription: only an answer from behind the
	// acknowledgement says that the next one finds the result gone.
	e.w.directed(replica, "ops", e.sub.Subject, &driverv1.Envelope{Body: &driverv1.Envelope_Ops{
		Ops: &driverv1.OpsRequest{OperationId: e.id},
	}})
	for {
		m, err := e.sub.NextMsg(time.Second)
		if err != nil {
			return r // the replica is gone
		}
		if env, err := bus.Decode(m.Data, ""); err == nil && env.GetOpsHeld() != nil {
			return r // before it came frames that were on their way
		}
	}
}

// awaitEnd waits until the claim on the machine has ended: the next operation replaces that.
func (e *exchange) awaitEnd(deadline time.Time) {
	e.w.t.Helper()
	for e.machine != "" && time.Now().Before(deadline) {
		c, _ := e.w.claim(e.machine)
		if c.GetOperationId() != e.id || c.GetState() != driverv1.Claim_STATE_RUNNING && c.GetState() != driverv1.Claim_STATE_BEGUN {
			return
		}
	}
}

// end returns what the exchange ends with, and who said so. Nothing is
// acknowledged: the replica may be gone.
func (e *exchange) end() (r *driverv1.Result, replica string) {
	e.w.t.Helper()
	deadline := time.Now().Add(patience)
	for time.Now().Before(deadline) {
		frame := e.frame()
		if frame.GetBusy() != nil {
			e.w.t.Fatalf("busy: %v", frame.GetBusy().GetReason())
		}
		if r := frame.GetResult(); r != nil {
			e.awaitEnd(deadline)

			return r, frame.GetReplica()
		}
	}
	e.w.t.Fatal("no result")

	return nil, ""
}

func (w *world) directed(replica, verb, reply string, env *driverv1.Envelope) {
	w.t.Helper()
	payload, err := bus.Encode(env, "")
	if err != nil {
		w.t.Fatal(err)
	}
	subject := fmt.Sprintf("mcm.v1.%s.replica.%s.%s.%s", testCluster, testProvider, replica, verb)
	if err := w.nc.PublishMsg(&nats.Msg{Subject: subject, Reply: reply, Data: payload}); err != nil {
		w.t.Fatal(err)
	}
}

func machine(name string) *driverv1.Machine {
	return &driverv1.Machine{Namespace: "ns", Name: name, Uid: "uid-" + name}
}

func create(m *driverv1.Machine, class *driverv1.ClassReference) *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Create{Create: &driverv1.CreateRequest{Machine: m, Class: class}}}
}

func status(m *driverv1.Machine, class *driverv1.ClassReference) *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Status{Status: &driverv1.StatusRequest{Machine: m, Class: class}}}
}

func deletion(m *driverv1.Machine, class *driverv1.ClassReference) *driverv1.Envelope {
	return &driverv1.Envelope{Body: &driverv1.Envelope_Delete{Delete: &driverv1.DeleteRequest{Machine: m, Class: class}}}
}

// figure returns the sum of a metric's values (of a histogram: their number)
// where the labels are as given.
func (w *world) figure(name string, labels map[string]string) float64 {
	w.t.Helper()
	families, err := w.stats.Gather()
	if err != nil {
		w.t.Fatal(err)
	}
	sum := 0.0
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			matching := 0
			for _, pair := range m.GetLabel() {
				if labels[pair.GetName()] == pair.GetValue() {
					matching++
				}
			}
			if matching == len(labels) {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}

	return sum
}

// A lockedBuffer takes what many goroutines write.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()

	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()

	return b.buf.String()
}
