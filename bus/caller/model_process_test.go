package caller

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A modelReplica is a real [Server] on the model's wire.
type modelReplica struct {
	name   string
	port   *port
	server *replica.Server
	stop   context.CancelFunc
	ended  chan struct{}
}

func (m *model) newReplica(name string) *modelReplica { return m.replicaWith(name, m.cloud.handle) }

// replicaWith makes a replica of which handle is the driver.
func (m *model) replicaWith(name string, handle func(context.Context, *modelReplica, *replica.Task) *driverv1.Result) *modelReplica {
	r := &modelReplica{name: name, port: m.network.port(name, false), ended: make(chan struct{})}
	ops := []driverv1.Operation{
		driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_INITIALIZE, driverv1.Operation_OPERATION_DELETE,
	}
	server, err := replica.New(r.port, replica.Config{
		Provider: "virtual", Replica: name, Slots: 4, Capabilities: ops, DrainTimeout: 3 * time.Second,
		CreateIdentity: m.identity, SettleTime: m.settle, Fence: m.fence, Logger: m.log.With("at", name),
	}, replica.HandlerFunc(func(ctx context.Context, t *replica.Task) *driverv1.Result { return handle(ctx, r, t) }))
	if err != nil {
		panic(err) //nolint:forbidigo // of a fixed configuration
	}
	r.server = server
	ctx, stop := context.WithCancel(m.ctx)
	r.stop = stop
	go func() {
		defer close(r.ended)
		if err := server.Run(ctx); err != nil {
			m.log.Error("replica", "err", err)
		}
	}()

	return r
}

func (r *modelReplica) nap(ctx context.Context, d time.Duration) error { return r.port.nap(ctx, d) }

// A journal is what the API server remembers of the machines: which operation
// runs, and whether it was begun. Only who leads can write.
type journal struct {
	mu       sync.Mutex
	leader   *modelManager
	machines []*machineJournal
	lives    int  // that have ended
	last     bool // a machine that is gone is not replaced any more
}

type machineJournal struct {
	uid    string
	step   int // create, initialize, delete, gone
	number int
	open   bool
}

var machineSteps = []driverv1.Operation{
	driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_INITIALIZE, driverv1.Operation_OPERATION_DELETE,
}

// epoch is that of who leads.
func (j *journal) epoch() uint64 {
	j.mu.Lock()
	defer j.mu.Unlock()

	return j.leader.epoch
}

func (j *journal) done() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, m := range j.machines {
		if m.step < len(machineSteps) {
			return false
		}
	}

	return true
}

// A modelManager is a real [Caller] on the model's wire, with what the dispatcher
// and the machine controller do around it.
type modelManager struct {
	m      *model
	name   string
	port   *port
	epoch  uint64
	caller *Caller
	ctx    context.Context
	stop   context.CancelFunc
	done   sync.WaitGroup
}

func (m *model) newManager(epoch uint64) *modelManager {
	mgr := &modelManager{m: m, name: fmt.Sprintf("mcm%d", epoch), epoch: epoch}
	mgr.port = m.network.port(mgr.name, true)
	caller, err := New(mgr.port, Config{
		Cluster: "default", Epoch: func() uint64 { return epoch }, Logger: m.log.With("at", mgr.name),
		Operations: &StreamConfig{first: m.network.first},
	})
	if err != nil {
		panic(err) //nolint:forbidigo // of a fixed configuration
	}
	mgr.caller = caller
	mgr.ctx, mgr.stop = context.WithCancel(m.ctx)
	m.journal.mu.Lock()
	m.journal.leader = mgr
	m.journal.mu.Unlock()
	mgr.done.Go(mgr.greet)
	for i := range m.machines {
		mgr.done.Go(func() { mgr.reconcile(i) })
	}

	return mgr
}

func (mgr *modelManager) close() {
	mgr.stop()
	mgr.done.Wait()
	mgr.caller.Close()
}

// greet is the leader's hello.
func (mgr *modelManager) greet() {
	for {
		payload, err := bus.Encode(&driverv1.Envelope{Body: &driverv1.Envelope_Hello{Hello: &driverv1.Hello{
			Cluster: "default", Mcm: mgr.name, Epoch: mgr.epoch,
		}}}, "")
		if err != nil {
			panic(err) //nolint:forbidigo // of a fixed message
		}
		_ = mgr.port.Publish(msg(bus.Pattern("default", bus.TreeHello), payload)) // it is repeated
		if sleep(mgr.ctx, bus.SessionInterval) != nil {
			return
		}
		select {
		case <-mgr.ctx.Done():
			return
		case <-mgr.caller.Behind():
		case <-time.After(5 * time.Second):
		}
	}
}

// reconcile takes machines through their lives, one after the other.
func (mgr *modelManager) reconcile(i int) {
	for {
		mj, op, again := mgr.open(i)
		if mj == nil {
			return
		}
		id := fmt.Sprintf("%s.%s.%d", mj.uid, bus.Verb(op), mj.number)
		out, err := mgr.dispatch(mj.uid, id, op, again)
		if mgr.ctx.Err() != nil || !mgr.store(i, id, out, err) {
			return
		}
		_ = mgr.caller.Acknowledge("virtual", out.Replica, id) // or it is kept for a day
	}
}

// open journals a machine's next operation before it is first sent. It returns
// nil when there is none, or this manager does not lead.
func (mgr *modelManager) open(i int) (mj *machineJournal, op driverv1.Operation, again bool) {
	if mgr.port.pass() != nil {
		return nil, op, false
	}
	j := mgr.m.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	now := j.machines[i]
	if j.leader != mgr || now.step == len(machineSteps) {
		return nil, op, false
	}
	again, now.open = now.open, true
	read := *now

	return &read, machineSteps[now.step], again
}

// store journals an outcome. It fails for a manager that does not lead.
func (mgr *modelManager) store(i int, id string, out *Outcome, err error) bool {
	if mgr.port.pass() != nil {
		return false
	}
	j := mgr.m.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.leader != mgr {
		return false
	}
	mgr.m.log.Info("stored", "operation_id", id, "replica", out.Replica, "attempts", out.Attempts, "err", err)
	mj := j.machines[i]
	mgr.m.cloud.outcome(mj.uid, id, out.Result)
	mj.open, mj.number = false, mj.number+1
	if err == nil {
		mj.step++
	}
	if mj.step == len(machineSteps) && !j.last {
		j.lives++
		*mj = machineJournal{uid: fmt.Sprintf("uid-%d-%d", i, j.lives)}
	}

	return true
}

// dispatch has an operation done for as long as it takes, as mcm/dispatch does.
func (mgr *modelManager) dispatch(uid, id string, op driverv1.Operation, again bool) (*Outcome, error) {
	machine := &driverv1.Machine{Uid: uid, Name: uid, Namespace: "shop"}
	body := &driverv1.Envelope{}
	switch op {
	case driverv1.Operation_OPERATION_CREATE:
		body.Body = &driverv1.Envelope_Create{Create: &driverv1.CreateRequest{Machine: machine}}
	case driverv1.Operation_OPERATION_INITIALIZE:
		body.Body = &driverv1.Envelope_Initialize{Initialize: &driverv1.InitializeRequest{Machine: machine}}
	default:
		body.Body = &driverv1.Envelope_Delete{Delete: &driverv1.DeleteRequest{Machine: machine}}
	}
	req := Request{
		Provider: "virtual", Namespace: "shop", Name: uid, OperationID: id, Body: body, Timeout: operationTime, Recover: again, Attempt: 1,
		Look: again, // a manager that takes over first finds out what is there
	}
	for {
		room := mgr.caller.Room("virtual")
		out, err := mgr.caller.Call(mgr.ctx, req)
		if req.Look && errors.Is(err, ErrNotHeld) {
			req.Look = false
			carryOutcome(&req, out)

			continue
		}
		if mgr.ctx.Err() != nil || bus.OriginOf(err) == bus.OriginDriver {
			return out, err
		}
		if bus.OriginOf(err) == bus.OriginTimeout {
			req.Recover = true
			carryOutcome(&req, out)
		}
		mgr.m.log.Info("waiting", "at", mgr.name, "operation_id", id, "attempts", out.Attempts, "err", err)
		wait := 5 * time.Second
		if out.Result != nil {
			room, wait = nil, 2*time.Second<<min(max(out.Attempts, 1)-1, 3)
		}
		select {
		case <-room:
		case <-time.After(wait):
		case <-mgr.ctx.Done():
		}
	}
}

func carryOutcome(req *Request, out *Outcome) {
	req.Attempt, req.Until = out.Attempts, out.Until
}

func msg(subject string, data []byte) *nats.Msg { return &nats.Msg{Subject: subject, Data: data} }

// modelLog writes what happens with the time since the start by the model's clock.
func modelLog(to io.Writer) *slog.Logger {
	start := time.Now()

	return slog.New(slog.NewTextHandler(to, &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.String("t", a.Value.Time().Sub(start).String())
		}

		return a
	}}))
}
