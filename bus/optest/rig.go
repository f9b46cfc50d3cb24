// Package optest runs the asking and the answering side of operations on a real NATS
// server, for the tests of both. It is for tests only, and fakes nothing but the driver.
package optest

import (
	"bytes"
	"context"
	"flag"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// Main runs a package's tests, and fails when they leave goroutines behind.
func Main(m *testing.M) {
	flag.Parse()
	// These tests wait for clocks of the protocol far more than they compute;
	// fuzzing only computes.
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue && flag.Lookup("test.fuzz").Value.String() == "" {
		if err := f.Value.Set("8"); err != nil {
			panic(err) //nolint:forbidigo // a number that flag itself would take
		}
	}
	// nats-server leaves these behind where a stream is made while it shuts down.
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server.(*fileStore).flushStreamStateLoop"),
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"))
}

const (
	Provider = "virtual"
	Cluster  = "default"
)

// A Rig is a bus with the asking side on it.
type Rig struct {
	NATS   *embedded.Server
	Conn   *bus.Conn
	Caller *caller.Caller
}

// NewRig starts a server with its store in memory, and a caller on it.
func NewRig(tb testing.TB) *Rig {
	tb.Helper()
	r := &Rig{NATS: bustest.Server(tb, embedded.Options{})}
	r.Conn = bustest.Connect(tb, bus.Config{URLs: []string{r.NATS.URL()}, Name: "mcm"})
	r.Caller = NewCaller(tb, r.Conn, caller.Config{})

	return r
}

// NewCaller makes a caller that ends with the test.
func NewCaller(tb testing.TB, conn *bus.Conn, cfg caller.Config) *caller.Caller {
	tb.Helper()
	cfg.Cluster, cfg.Logger = Cluster, bustest.Quiet()
	if cfg.Operations == nil {
		cfg.Operations = &caller.StreamConfig{Memory: true}
	}
	client, err := caller.New(conn, cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(client.Close)

	return client
}

// A Replica is a running driver behind a proxy of its own.
type Replica struct {
	*replica.Server

	Proxy *bustest.Proxy
	Conn  *bus.Conn
	Stop  context.CancelFunc
	Done  chan error
}

// Replica starts one and returns when the rig's caller knows of it.
func (r *Rig) Replica(tb testing.TB, h replica.HandlerFunc, change ...func(*replica.Config)) *Replica {
	tb.Helper()
	rep := &Replica{Proxy: bustest.NewProxy(tb, r.NATS.URL()), Done: make(chan error, 1)}
	rep.Conn = bustest.Connect(tb, bus.Config{
		URLs: []string{rep.Proxy.URL()}, Name: "driver", InboxPrefix: bus.InboxPrefix(Provider),
	})
	cfg := replica.Config{
		Provider: Provider, Version: "1.2.3", Slots: 4, Logger: bustest.Quiet(),
		CreateIdentity: driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN, DrainTimeout: 20 * time.Millisecond,
	}
	for number := range driverv1.Operation_name {
		if number != 0 {
			cfg.Capabilities = append(cfg.Capabilities, driverv1.Operation(number))
		}
	}
	for _, f := range change {
		f(&cfg)
	}
	var err error
	if rep.Server, err = replica.New(rep.Conn, cfg, h); err != nil {
		tb.Fatal(err)
	}
	ctx, stop := context.WithCancel(tb.Context())
	rep.Stop = stop
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		rep.Done <- rep.Run(ctx)
	}()
	tb.Cleanup(func() {
		// Off the bus it waits for nobody's acknowledgement.
		rep.Proxy.Cut()
		bustest.Eventually(tb, "the replica notices the cut", func() bool { return !rep.Conn.Up() })
		stop()
		<-ended
	})
	r.Sees(tb, rep)

	return rep
}

// Sees waits until the rig's caller has heard a replica.
func (r *Rig) Sees(tb testing.TB, rep *Replica) {
	tb.Helper()
	bustest.Eventually(tb, "session of the new replica", func() bool { return r.Session(rep) != nil })
}

// Session returns what the rig's caller last heard of a replica.
func (r *Rig) Session(rep *Replica) *driverv1.Session {
	for _, known := range r.Caller.Replicas() {
		if known.Session.GetReplica() == rep.Replica() {
			return known.Session
		}
	}

	return nil
}

// Serial numbers what the tests make, so that no two share a name.
var Serial atomic.Uint64

// Create returns a request for the create of a machine that no other test has.
func Create(machine string) caller.Request {
	uid := strings.ReplaceAll(machine, ".", "-") + "-" + strconv.FormatUint(Serial.Add(1), 10)

	return caller.Request{
		Provider: Provider, Namespace: "shop", Name: machine, OperationID: uid + ".create.0", Timeout: time.Minute,
		Body: &driverv1.Envelope{Body: &driverv1.Envelope_Create{Create: &driverv1.CreateRequest{
			Machine: &driverv1.Machine{Namespace: "shop", Name: machine, Uid: uid},
		}}},
	}
}

// Status returns a request for a machine's status.
func Status(machine string) caller.Request {
	return caller.Request{
		Provider: Provider, Namespace: "shop", Name: machine, Timeout: time.Minute,
		OperationID: "read." + strconv.FormatUint(Serial.Add(1), 10),
		Body: &driverv1.Envelope{Body: &driverv1.Envelope_Status{Status: &driverv1.StatusRequest{
			Machine: &driverv1.Machine{Namespace: "shop", Name: machine, Uid: machine},
		}}},
	}
}

// Created is what a driver answers to any create or status.
func Created(t *replica.Task) *driverv1.Result {
	instance := &driverv1.Instance{ProviderId: "virtual://" + bus.MachineOf(t.Request).GetName()}
	if t.Operation == driverv1.Operation_OPERATION_STATUS {
		return &driverv1.Result{Payload: &driverv1.Result_InstanceStatus{
			InstanceStatus: &driverv1.StatusResponse{Instance: instance},
		}}
	}

	return &driverv1.Result{Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{Instance: instance}}}
}

// A Gate is a handler whose operations wait to be let through.
type Gate struct {
	Entered chan *replica.Task
	Open    chan struct{}
	once    sync.Once
	Runs    atomic.Int32
	Begins  bool // a call that changes something is at the provider while they wait
}

// NewGate makes a gate that lets everything through when the test ends.
func NewGate(tb testing.TB) *Gate {
	tb.Helper()
	g := &Gate{Entered: make(chan *replica.Task, 100), Open: make(chan struct{})}
	tb.Cleanup(g.Release)

	return g
}

// Release lets all operations through, from now on too.
func (g *Gate) Release() { g.once.Do(func() { close(g.Open) }) }

// Handle is the gate's [replica.HandlerFunc].
func (g *Gate) Handle(ctx context.Context, t *replica.Task) *driverv1.Result {
	g.Runs.Add(1)
	if g.Begins {
		if err := t.BeginMutation(); err != nil {
			return &driverv1.Result{Status: bus.StatusOf(err)}
		}
	}
	g.Entered <- t
	select {
	case <-g.Open:
		return Created(t)
	case <-ctx.Done():
		return &driverv1.Result{Status: bus.StatusOf(ctx.Err())}
	}
}

// An Answer is what a Call in the background returned.
type Answer struct {
	Out *caller.Outcome
	Err error
}

// Call has an operation done in the background.
func Call(ctx context.Context, c *caller.Caller, req caller.Request) <-chan Answer {
	ch := make(chan Answer, 1)
	go func() {
		out, err := c.Call(ctx, req)
		ch <- Answer{out, err}
	}()

	return ch
}

// WantOK fails unless the operation succeeded.
func WantOK(tb testing.TB, a Answer) *caller.Outcome {
	tb.Helper()
	if a.Err != nil {
		tb.Fatalf("Call: %v (code %v, origin %v)", a.Err, bus.CodeOf(a.Err), bus.OriginOf(a.Err))
	}

	return a.Out
}

// WantError fails unless an error has this origin and code.
func WantError(tb testing.TB, err error, origin bus.Origin, code driverv1.Code) {
	tb.Helper()
	if err == nil || bus.OriginOf(err) != origin || bus.CodeOf(err) != code {
		tb.Fatalf("error is %v (code %v, origin %v), want code %v, origin %v",
			err, bus.CodeOf(err), bus.OriginOf(err), code, origin)
	}
}

// Audit returns a message about the end of a machine's create.
func Audit(machine string) *driverv1.Audit {
	return &driverv1.Audit{
		OperationId: "x", Provider: Provider, Operation: driverv1.Operation_OPERATION_CREATE, Namespace: "shop", Name: machine,
	}
}

// Run runs a replica on a connection of its own making until the test ends.
func Run(tb testing.TB, conn *bus.Conn, h replica.HandlerFunc, change ...func(*replica.Config)) *replica.Server {
	tb.Helper()
	cfg := replica.Config{
		Provider: Provider, Version: "1.0.0", Slots: 2048, Logger: bustest.Quiet(),
		CreateIdentity: driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN,
		Capabilities: []driverv1.Operation{
			driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_INITIALIZE, driverv1.Operation_OPERATION_STATUS,
		},
	}
	for _, f := range change {
		f(&cfg)
	}
	server, err := replica.New(conn, cfg, h)
	if err != nil {
		tb.Fatal(err)
	}
	ctx, stop := context.WithCancel(tb.Context())
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx) }()
	tb.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			tb.Errorf("Run: %v", err)
		}
	})

	return server
}

// Violations keeps what a connection logs as errors.
type Violations struct {
	mu    sync.Mutex
	lines bytes.Buffer
}

// Write keeps a line.
func (v *Violations) Write(p []byte) (int, error) {
	v.mu.Lock()
	defer v.mu.Unlock()

	return v.lines.Write(p)
}

// Logger returns a logger that keeps errors.
func (v *Violations) Logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(v, &slog.HandlerOptions{Level: slog.LevelError}))
}

// Warnings is Logger for a test that expects to be warned.
func (v *Violations) Warnings() *slog.Logger {
	return slog.New(slog.NewTextHandler(v, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

// All returns the lines so far.
func (v *Violations) All() string {
	v.mu.Lock()
	defer v.mu.Unlock()

	return v.lines.String()
}

// NewStoredRig is [NewRig] with the store on disk.
func NewStoredRig(tb testing.TB) *Rig {
	tb.Helper()
	r := &Rig{NATS: bustest.Server(tb, embedded.Options{StoreDir: tb.TempDir()})}
	r.Conn = bustest.Connect(tb, bus.Config{URLs: []string{r.NATS.URL()}, Name: "mcm"})
	r.Caller = NewCaller(tb, r.Conn, caller.Config{Operations: &caller.StreamConfig{}})

	return r
}

// Stored returns the record of a subject in the operations stream, nil for none.
func (r *Rig) Stored(tb testing.TB, tree bus.Tree, name string) *driverv1.Envelope {
	tb.Helper()
	nc := bustest.Raw(tb, r.NATS.URL())
	defer nc.Close()
	subject := "mcm.v1." + Cluster + "." + string(tree) + "." + Provider + "." + name
	m, err := nc.Request("$JS.API.DIRECT.GET."+bus.StreamName(Cluster, Provider)+"."+subject, nil, nats.DefaultTimeout*5)
	if err != nil {
		tb.Fatalf("read %s: %v", subject, err)
	}
	if m.Header.Get("Status") == "404" {
		return nil
	}
	env, err := bus.Decode(m.Data, "")
	if err != nil {
		tb.Fatal(err)
	}

	return env
}

// ClaimOf returns the claim on a request's machine, nil for none.
func (r *Rig) ClaimOf(tb testing.TB, req caller.Request) *driverv1.Claim {
	tb.Helper()

	return r.Stored(tb, bus.TreeClaim, bus.MachineOf(req.Body).GetUid()).GetClaim()
}

// Identity returns a change of configuration: what identifies creates.
func Identity(id driverv1.CreateIdentity) func(*replica.Config) {
	return func(cfg *replica.Config) { cfg.CreateIdentity = id }
}

// Pair runs two replicas of one handler and returns the one that took req, and
// the other.
func (r *Rig) Pair(t *testing.T, g *Gate, req caller.Request, change ...func(*replica.Config)) (
	holder, other *Replica, done <-chan Answer,
) {
	t.Helper()
	a, b := r.Replica(t, g.Handle, change...), r.Replica(t, g.Handle, change...)
	accepted := make(chan string, 1)
	req.OnAccepted = func(_ uint32, replica string) {
		select {
		case accepted <- replica:
		default:
		}
	}
	done = Call(t.Context(), r.Caller, req)
	bustest.Receive(t, "the handler", g.Entered)
	if bustest.Receive(t, "accepted", accepted) == a.Replica() {
		return a, b, done
	}

	return b, a, done
}

// Ready waits until the operations stream takes writes.
func (r *Rig) Ready(tb testing.TB) {
	tb.Helper()
	bustest.Eventually(tb, "the operations stream", func() bool {
		states := r.Caller.Streams()

		return len(states) == 1 && states[0].Ready
	})
}

// Restart stops the server and has it run again, with or without its store.
func (r *Rig) Restart(t *testing.T, dir string, keep bool) {
	t.Helper()
	r.NATS.Stop()
	if !keep {
		if err := os.RemoveAll(filepath.Join(dir, "jetstream")); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.NATS.Restart(); err != nil {
		t.Fatal(err)
	}
}

// StrangeReplica is on the bus as a driver of a later protocol, and counts what it is
// asked for.
func (r *Rig) StrangeReplica(t *testing.T) (requests *atomic.Int64) {
	t.Helper()
	conn, err := nats.Connect(r.NATS.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	requests = &atomic.Int64{}
	if _, err := conn.QueueSubscribe("mcm.v1.default.driver.virtual.>", "driver", func(*nats.Msg) { requests.Add(1) }); err != nil {
		t.Fatal(err)
	}
	beat := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(bus.SessionInterval)
		defer tick.Stop()
		for sequence := uint64(1); ; sequence++ {
			payload, err := bus.Encode(&driverv1.Envelope{Replica: "strange", Body: &driverv1.Envelope_Session{Session: &driverv1.Session{
				Cluster: Cluster, Provider: Provider, Replica: "strange", Sequence: sequence, Version: "9.0.0", ProtocolMin: 5, Protocol: 7,
				Slots: 100, CreateIdentity: driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN,
				Capabilities: []driverv1.Operation{driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_STATUS},
			}}}, "")
			if err != nil {
				t.Error(err)

				return
			}
			if err := conn.Publish("mcm.v1.default.session.virtual.strange", payload); err != nil {
				t.Error(err)

				return
			}
			select {
			case <-beat:
				return
			case <-tick.C:
			}
		}
	}()
	t.Cleanup(func() { close(beat); <-done })
	bustest.Eventually(t, "session of the driver of a later protocol", func() bool { return len(r.Caller.Replicas()) == 1 })

	return requests
}

// NewKey returns a new key for sealing.
func NewKey(tb testing.TB) *bus.SealKey {
	tb.Helper()
	key, err := bus.NewSealKey()
	if err != nil {
		tb.Fatal(err)
	}

	return key
}

// Then makes a request for the operation of req's machine that follows it.
func Then(req caller.Request, op, n string) caller.Request {
	m := bus.MachineOf(req.Body)
	req.OperationID = m.GetUid() + "." + op + "." + n
	switch op {
	case "delete":
		req.Body = &driverv1.Envelope{Body: &driverv1.Envelope_Delete{Delete: &driverv1.DeleteRequest{Machine: m}}}
	default:
		req.Body = &driverv1.Envelope{Body: &driverv1.Envelope_Initialize{Initialize: &driverv1.InitializeRequest{Machine: m}}}
	}

	return req
}
