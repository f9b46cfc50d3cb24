package bus_test

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

	"go.uber.org/goleak"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
	"github.com/nats-io/nats.go"
)

func TestMain(m *testing.M) {
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
	provider = "virtual"
	cluster  = "default"
)

// A rig is a bus with the asking side on it.
type rig struct {
	srv    *embedded.Server
	conn   *bus.Conn
	caller *bus.Caller
}

func newRig(tb testing.TB) *rig {
	tb.Helper()
	r := &rig{srv: bustest.Server(tb, embedded.Options{})}
	r.conn = bustest.Connect(tb, bus.Config{URLs: []string{r.srv.URL()}, Name: "mcm"})
	r.caller = newCaller(tb, r.conn, bus.CallerConfig{})

	return r
}

func newCaller(tb testing.TB, conn *bus.Conn, cfg bus.CallerConfig) *bus.Caller {
	tb.Helper()
	cfg.Cluster, cfg.Logger = cluster, bustest.Quiet()
	if cfg.Operations == nil {
		cfg.Operations = &bus.StreamConfig{Memory: true}
	}
	caller, err := bus.NewCaller(conn, cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(caller.Close)

	return caller
}

// A replica is a running driver behind a proxy of its own.
type replica struct {
	*bus.Server

	proxy *bustest.Proxy
	conn  *bus.Conn
	stop  context.CancelFunc
	done  chan error
}

// replica starts one and returns when the rig's caller knows of it.
func (r *rig) replica(tb testing.TB, h bus.HandlerFunc, change ...func(*bus.ServerConfig)) *replica {
	tb.Helper()
	rep := &replica{proxy: bustest.NewProxy(tb, r.srv.URL()), done: make(chan error, 1)}
	rep.conn = bustest.Connect(tb, bus.Config{
		URLs: []string{rep.proxy.URL()}, Name: "driver", InboxPrefix: bus.InboxPrefix(provider),
	})
	cfg := bus.ServerConfig{
		Provider: provider, Version: "1.2.3", Slots: 4, Logger: bustest.Quiet(),
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
	if rep.Server, err = bus.NewServer(rep.conn, cfg, h); err != nil {
		tb.Fatal(err)
	}
	ctx, stop := context.WithCancel(tb.Context())
	rep.stop = stop
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		rep.done <- rep.Run(ctx)
	}()
	tb.Cleanup(func() {
		// Off the bus it waits for nobody's acknowledgement.
		rep.proxy.Cut()
		bustest.Eventually(tb, "the replica notices the cut", func() bool { return !rep.conn.Up() })
		stop()
		<-ended
	})
	r.sees(tb, rep)

	return rep
}

func (r *rig) sees(tb testing.TB, rep *replica) {
	tb.Helper()
	bustest.Eventually(tb, "session of the new replica", func() bool { return r.session(rep) != nil })
}

// session returns what the rig's caller last heard of a replica.
func (r *rig) session(rep *replica) *driverv1.Session {
	for _, known := range r.caller.Replicas() {
		if known.Session.GetReplica() == rep.Replica() {
			return known.Session
		}
	}

	return nil
}

var serial atomic.Uint64

// create is a request nobody made before.
func create(machine string) bus.Request {
	uid := strings.ReplaceAll(machine, ".", "-") + "-" + strconv.FormatUint(serial.Add(1), 10)

	return bus.Request{
		Provider: provider, Namespace: "shop", Name: machine, OperationID: uid + ".create.0", Timeout: time.Minute,
		Body: &driverv1.Envelope{Body: &driverv1.Envelope_Create{Create: &driverv1.CreateRequest{
			Machine: &driverv1.Machine{Namespace: "shop", Name: machine, Uid: uid},
		}}},
	}
}

func status(machine string) bus.Request {
	return bus.Request{
		Provider: provider, Namespace: "shop", Name: machine, Timeout: time.Minute,
		OperationID: "read." + strconv.FormatUint(serial.Add(1), 10),
		Body: &driverv1.Envelope{Body: &driverv1.Envelope_Status{Status: &driverv1.StatusRequest{
			Machine: &driverv1.Machine{Namespace: "shop", Name: machine, Uid: machine},
		}}},
	}
}

// created is what a driver answers to any create or status.
func created(t *bus.Task) *driverv1.Result {
	instance := &driverv1.Instance{ProviderId: "virtual://" + bus.MachineOf(t.Request).GetName()}
	if t.Operation == driverv1.Operation_OPERATION_STATUS {
		return &driverv1.Result{Payload: &driverv1.Result_InstanceStatus{
			InstanceStatus: &driverv1.StatusResponse{Instance: instance},
		}}
	}

	return &driverv1.Result{Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{Instance: instance}}}
}

// A gate is a handler whose operations wait to be let through.
type gate struct {
	entered chan *bus.Task
	open    chan struct{}
	once    sync.Once
	runs    atomic.Int32
	begins  bool // a call that changes something is at the provider while they wait
}

func newGate(tb testing.TB) *gate {
	tb.Helper()
	g := &gate{entered: make(chan *bus.Task, 100), open: make(chan struct{})}
	tb.Cleanup(g.release)

	return g
}

func (g *gate) release() { g.once.Do(func() { close(g.open) }) }

func (g *gate) handle(ctx context.Context, t *bus.Task) *driverv1.Result {
	g.runs.Add(1)
	if g.begins {
		if err := t.BeginMutation(); err != nil {
			return &driverv1.Result{Status: bus.StatusOf(err)}
		}
	}
	g.entered <- t
	select {
	case <-g.open:
		return created(t)
	case <-ctx.Done():
		return &driverv1.Result{Status: bus.StatusOf(ctx.Err())}
	}
}

// An answer is what a Call in the background returned.
type answer struct {
	out *bus.Outcome
	err error
}

func call(ctx context.Context, c *bus.Caller, req bus.Request) <-chan answer {
	ch := make(chan answer, 1)
	go func() {
		out, err := c.Call(ctx, req)
		ch <- answer{out, err}
	}()

	return ch
}

// wantOK fails unless the operation succeeded.
func wantOK(tb testing.TB, a answer) *bus.Outcome {
	tb.Helper()
	if a.err != nil {
		tb.Fatalf("Call: %v (code %v, origin %v)", a.err, bus.CodeOf(a.err), bus.OriginOf(a.err))
	}

	return a.out
}

func wantError(tb testing.TB, err error, origin bus.Origin, code driverv1.Code) {
	tb.Helper()
	if err == nil || bus.OriginOf(err) != origin || bus.CodeOf(err) != code {
		tb.Fatalf("error is %v (code %v, origin %v), want code %v, origin %v",
			err, bus.CodeOf(err), bus.OriginOf(err), code, origin)
	}
}

func audit(machine string) *driverv1.Audit {
	return &driverv1.Audit{
		OperationId: "x", Provider: provider, Operation: driverv1.Operation_OPERATION_CREATE, Namespace: "shop", Name: machine,
	}
}

// run runs a replica on a connection of its own making until the test ends.
func run(tb testing.TB, conn *bus.Conn, h bus.HandlerFunc, change ...func(*bus.ServerConfig)) *bus.Server {
	tb.Helper()
	cfg := bus.ServerConfig{
		Provider: provider, Version: "1.0.0", Slots: 2048, Logger: bustest.Quiet(),
		CreateIdentity: driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN,
		Capabilities: []driverv1.Operation{
			driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_INITIALIZE, driverv1.Operation_OPERATION_STATUS,
		},
	}
	for _, f := range change {
		f(&cfg)
	}
	server, err := bus.NewServer(conn, cfg, h)
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

// violations keeps what a connection logs as errors.
type violations struct {
	mu    sync.Mutex
	lines bytes.Buffer
}

func (v *violations) Write(p []byte) (int, error) {
	v.mu.Lock()
	defer v.mu.Unlock()

	return v.lines.Write(p)
}

func (v *violations) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(v, &slog.HandlerOptions{Level: slog.LevelError}))
}

// warnings is logger for a test that expects to be warned.
func (v *violations) warnings() *slog.Logger {
	return slog.New(slog.NewTextHandler(v, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

func (v *violations) all() string {
	v.mu.Lock()
	defer v.mu.Unlock()

	return v.lines.String()
}

// newClaimRig is a rig with JetStream, whose caller makes operations streams.
func newClaimRig(tb testing.TB) *rig {
	tb.Helper()
	r := &rig{srv: bustest.Server(tb, embedded.Options{StoreDir: tb.TempDir()})}
	r.conn = bustest.Connect(tb, bus.Config{URLs: []string{r.srv.URL()}, Name: "mcm"})
	r.caller = newCaller(tb, r.conn, bus.CallerConfig{Operations: &bus.StreamConfig{}})

	return r
}

// stored returns the record of a subject in the operations stream, nil for none.
func (r *rig) stored(tb testing.TB, tree bus.Tree, name string) *driverv1.Envelope {
	tb.Helper()
	nc := bustest.Raw(tb, r.srv.URL())
	defer nc.Close()
	subject := "mcm.v1." + cluster + "." + string(tree) + "." + provider + "." + name
	m, err := nc.Request("$JS.API.DIRECT.GET."+bus.StreamName(cluster, provider)+"."+subject, nil, nats.DefaultTimeout*5)
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

func (r *rig) claimOf(tb testing.TB, req bus.Request) *driverv1.Claim {
	tb.Helper()

	return r.stored(tb, bus.TreeClaim, bus.MachineOf(req.Body).GetUid()).GetClaim()
}

func identity(id driverv1.CreateIdentity) func(*bus.ServerConfig) {
	return func(cfg *bus.ServerConfig) { cfg.CreateIdentity = id }
}

// pair runs two replicas of one handler and returns the one that took req, and
// the other.
func (r *rig) pair(t *testing.T, g *gate, req bus.Request, change ...func(*bus.ServerConfig)) (
	holder, other *replica, done <-chan answer,
) {
	t.Helper()
	a, b := r.replica(t, g.handle, change...), r.replica(t, g.handle, change...)
	accepted := make(chan string, 1)
	req.OnAccepted = func(_ uint32, replica string) {
		select {
		case accepted <- replica:
		default:
		}
	}
	done = call(t.Context(), r.caller, req)
	bustest.Receive(t, "the handler", g.entered)
	if bustest.Receive(t, "accepted", accepted) == a.Replica() {
		return a, b, done
	}

	return b, a, done
}

func (r *rig) ready(tb testing.TB) {
	tb.Helper()
	bustest.Eventually(tb, "the operations stream", func() bool {
		states := r.caller.Streams()

		return len(states) == 1 && states[0].Ready
	})
}

// restart stops the server and has it run again, with or without its store.
func (r *rig) restart(t *testing.T, dir string, keep bool) {
	t.Helper()
	r.srv.Stop()
	if !keep {
		if err := os.RemoveAll(filepath.Join(dir, "jetstream")); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.srv.Restart(); err != nil {
		t.Fatal(err)
	}
}

// strangeReplica is on the bus as a driver of a later protocol, and counts what it is
// asked for.
func (r *rig) strangeReplica(t *testing.T) (requests *atomic.Int64) {
	t.Helper()
	conn, err := nats.Connect(r.srv.URL())
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
				Cluster: cluster, Provider: provider, Replica: "strange", Sequence: sequence, Version: "9.0.0", ProtocolMin: 5, Protocol: 7,
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
	bustest.Eventually(t, "session of the driver of a later protocol", func() bool { return len(r.caller.Replicas()) == 1 })

	return requests
}

func newKey(t *testing.T) *bus.SealKey {
	t.Helper()
	key, err := bus.NewSealKey()
	if err != nil {
		t.Fatal(err)
	}

	return key
}

// then makes a request for the operation of req's machine that follows it.
func then(req bus.Request, op, n string) bus.Request {
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
