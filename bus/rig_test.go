package bus_test

import (
	"bytes"
	"context"
	"flag"
	"log/slog"
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
