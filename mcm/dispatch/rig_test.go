package dispatch_test

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func TestMain(m *testing.M) {
	// What the embedded NATS server leaves running for the life of the process.
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server.(*fileStore).flushStreamStateLoop"),
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"))
}

const (
	provider = "virtual"
	cluster  = "default"
)

// A rig is a bus with one manager's side of it.
type rig struct {
	srv *embedded.Server
	*manager
}

// A manager is what a process that runs operations has.
type manager struct {
	*dispatch.Dispatcher

	caller  *caller.Caller
	logs    *lockedBuffer // JSON lines, of all verbosities
	notices chan types.NamespacedName
	stop    func()
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{srv: bustest.Server(t, embedded.Options{})}
	r.manager = r.newManager(t)

	return r
}

func (r *rig) newManager(t *testing.T) *manager {
	t.Helper()
	conn := bustest.Connect(t, bus.Config{URLs: []string{r.srv.URL()}, Name: "mcm"})
	client, err := caller.New(conn, caller.Config{Cluster: cluster, Operations: &caller.StreamConfig{Memory: true}, Logger: bustest.Quiet()})
	if err != nil {
		t.Fatal(err)
	}
	announcer, err := bus.NewAnnouncer(conn, cluster)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	logs := &lockedBuffer{}
	ctx = logr.NewContext(ctx, logr.FromSlogHandler(slog.NewJSONHandler(logs, &slog.HandlerOptions{Level: slog.LevelDebug})))
	m := &manager{
		logs:       logs,
		Dispatcher: dispatch.New(ctx, client, announcer), caller: client,
		notices: make(chan types.NamespacedName, 1000),
	}
	m.Notify(func(name types.NamespacedName) { m.notices <- name })
	m.stop = sync.OnceFunc(func() {
		cancel()
		m.Wait()
		client.Close()
	})
	t.Cleanup(m.stop)

	return m
}

// replica starts a driver replica and returns when the rig's manager knows it.
func (r *rig) replica(t *testing.T, h replica.HandlerFunc, change ...func(*replica.Config)) *replica.Server {
	t.Helper()
	conn := bustest.Connect(t, bus.Config{
		URLs: []string{r.srv.URL()}, Name: "driver", InboxPrefix: bus.InboxPrefix(provider),
	})
	cfg := replica.Config{
		Provider: provider, Version: "1.2.3", Slots: 4, Logger: bustest.Quiet(), DrainTimeout: 10 * time.Millisecond,
		CreateIdentity: driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN,
		Capabilities: []driverv1.Operation{
			driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_DELETE,
			driverv1.Operation_OPERATION_INITIALIZE, driverv1.Operation_OPERATION_LIST,
		},
	}
	for _, f := range change {
		f(&cfg)
	}
	rep, err := replica.New(conn, cfg, h)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- rep.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	bustest.Eventually(t, "session of the new replica", func() bool { return r.session(rep) != nil })

	return rep
}

// losable starts a replica that the returned function takes off the bus.
func (r *rig) losable(t *testing.T, g *gate) (cut func()) {
	t.Helper()
	proxy := bustest.NewProxy(t, r.srv.URL())
	conn := bustest.Connect(t, bus.Config{URLs: []string{proxy.URL()}, Name: "driver", InboxPrefix: bus.InboxPrefix(provider)})
	rep, err := replica.New(conn, replica.Config{
		Provider: provider, Logger: bustest.Quiet(), CreateIdentity: driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN,
		Capabilities: []driverv1.Operation{driverv1.Operation_OPERATION_CREATE},
	}, replica.HandlerFunc(g.handle))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- rep.Run(ctx) }()
	t.Cleanup(func() { cancel(); g.release(); <-done })
	bustest.Eventually(t, "session", func() bool { return r.session(rep) != nil })

	return proxy.Cut
}

// session returns what the rig's manager last heard of a replica.
func (r *rig) session(rep *replica.Server) *driverv1.Session {
	for _, known := range r.caller.Replicas() {
		if known.Session.GetReplica() == rep.Replica() {
			return known.Session
		}
	}

	return nil
}

// until waits for a phase of a machine's operation and returns the state.
func (m *manager) until(t *testing.T, uid types.UID, phase dispatch.Phase) dispatch.State {
	t.Helper()
	var state dispatch.State
	bustest.Eventually(t, "phase of the operation", func() bool {
		var ok bool
		state, ok = m.State(uid)

		return ok && state.Phase == phase
	})

	return state
}

// noticed waits for a notice of the machine.
func (m *manager) noticed(t *testing.T, machine *v1alpha1.Machine) {
	t.Helper()
	want := types.NamespacedName{Namespace: machine.Namespace, Name: machine.Name}
	if got := bustest.Receive(t, "notice of a change", m.notices); got != want {
		t.Fatalf("notice of %v, want %v", got, want)
	}
}

func newMachine(name string) *v1alpha1.Machine {
	return &v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(name + "-uid")}}
}

func operation(kind dispatch.Kind, machine *v1alpha1.Machine, number int64) dispatch.Operation {
	return dispatch.Operation{Kind: kind, Number: number, Machine: machine, Provider: provider, Timeout: time.Minute}
}

// A gate is a handler whose operations wait to be let through; what they came
// to is for answer to say.
type gate struct {
	entered chan *replica.Task
	open    chan struct{}
	release func()
	answer  func(*replica.Task) *driverv1.Result
}

func newGate(t *testing.T) *gate {
	t.Helper()
	g := &gate{entered: make(chan *replica.Task, 100), open: make(chan struct{}), answer: created}
	g.release = sync.OnceFunc(func() { close(g.open) })
	t.Cleanup(g.release)

	return g
}

func (g *gate) handle(ctx context.Context, t *replica.Task) *driverv1.Result {
	g.entered <- t
	select {
	case <-g.open:
		return g.answer(t)
	case <-ctx.Done():
		return &driverv1.Result{Status: bus.StatusOf(ctx.Err())}
	}
}

// created is what a driver answers to any operation.
func created(t *replica.Task) *driverv1.Result {
	name := bus.MachineOf(t.Request).GetName()
	instance := &driverv1.Instance{
		ProviderId: "virtual://" + name, NodeName: "node-" + name,
		Addresses: []*driverv1.Address{{Type: string(corev1.NodeInternalIP), Address: "10.0.0.1"}},
	}
	switch t.Operation {
	case driverv1.Operation_OPERATION_DELETE:
		return &driverv1.Result{Payload: &driverv1.Result_Delete{Delete: &driverv1.DeleteResponse{}}}
	case driverv1.Operation_OPERATION_INITIALIZE:
		return &driverv1.Result{Payload: &driverv1.Result_Initialize{Initialize: &driverv1.InitializeResponse{Instance: instance}}}
	default:
		return &driverv1.Result{Payload: &driverv1.Result_Create{
			Create: &driverv1.CreateResponse{Instance: instance, LastKnownState: "seen"},
		}}
	}
}

// at once answers without waiting.
func atOnce(_ context.Context, t *replica.Task) *driverv1.Result { return created(t) }

func contains(t *testing.T, text, part string) {
	t.Helper()
	if !strings.Contains(text, part) {
		t.Errorf("%q does not contain %q", text, part)
	}
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

// waits returns once a machine's operation waits for something.
func (r *rig) waits(t *testing.T, name, reason string) {
	t.Helper()
	bustest.Eventually(t, name+" waits: "+reason, func() bool {
		for _, op := range r.Waiting().GetOperations() {
			if op.GetName() == name && strings.Contains(op.GetLastProgress(), reason) {
				return true
			}
		}

		return false
	})
}
