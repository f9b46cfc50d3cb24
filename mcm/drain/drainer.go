package drain

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// A Drainer runs drains, one at a time for each machine. It is safe for concurrent use.
type Drainer struct {
	client      kubernetes.Interface
	settings    Settings
	metrics     *metrics
	slots       chan struct{} // one for each request in flight
	attachments attachmentReader
	ctx         context.Context // drains end with the drainer, not with the caller of Start

	mu      sync.Mutex
	drains  map[types.UID]*entry
	notify  func(types.NamespacedName)
	running sync.WaitGroup
}

// An entry is a machine's drain. Its state is guarded by Drainer.mu.
type entry struct {
	req    Request
	cancel context.CancelFunc
	ended  chan struct{}
	state  State
}

// New returns a Drainer for the cluster that the Nodes are in. Its drains stop when ctx ends;
// the next manager starts them again.
func New(ctx context.Context, client kubernetes.Interface, settings Settings) *Drainer {
	settings = settings.withDefaults()

	return &Drainer{
		client: client, settings: settings, metrics: newMetrics(), ctx: ctx,
		slots:  make(chan struct{}, settings.Requests),
		drains: map[types.UID]*entry{}, notify: func(types.NamespacedName) {},
	}
}

// Notify sets the function to call when a machine's drain has ended or is newly blocked. It
// must be called before the first Start; f must not block.
func (d *Drainer) Notify(f func(types.NamespacedName)) { d.notify = f }

// Wait returns when all drains have stopped after New's ctx ended.
func (d *Drainer) Wait() { d.running.Wait() }

// Start begins a drain unless the machine has one, and returns the drain's state. It never
// blocks. A drain stays Done until Forget, with two exceptions. A request with Force replaces
// a drain that is running or has failed. And a request with another value of Stays replaces
// any drain.
func (d *Drainer) Start(req Request) State {
	d.mu.Lock()
	defer d.mu.Unlock()
	before, ok := d.drains[req.UID]
	if ok {
		succeeded := before.state.Phase == Done && before.state.Err == nil
		sameEnd := before.req.Stays == req.Stays
		if sameEnd && (before.state.Forced || succeeded || !req.Force) {
			return before.state
		}
		before.cancel()
		if sameEnd {
			d.log(&before.req).Info("drain is forced from now on")
		}
	}
	ctx, cancel := context.WithCancel(d.ctx)
	e := &entry{req: req, cancel: cancel, ended: make(chan struct{}), state: State{Forced: req.Force}}
	d.drains[req.UID] = e
	d.running.Go(func() {
		defer close(e.ended)
		defer cancel()
		if before != nil {
			<-before.ended
		}
		d.run(ctx, e)
	})

	return e.state
}

// State returns the state of a machine's drain; false if it has none.
func (d *Drainer) State(uid types.UID) (State, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e, ok := d.drains[uid]
	if !ok {
		return State{}, false
	}

	return e.state, true
}

// Forget stops a machine's drain and drops its state.
func (d *Drainer) Forget(uid types.UID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if e, ok := d.drains[uid]; ok {
		e.cancel()
		delete(d.drains, uid)
	}
}

// run drains until the drain ends, stores the outcome and notifies, unless the drain was
// replaced or forgotten.
func (d *Drainer) run(ctx context.Context, e *entry) {
	defer d.metrics.started()()
	log := d.log(&e.req)
	log.Info("drain has started", "timeout", e.req.Timeout.String(), "max_evict_retries", e.req.MaxEvictRetries)
	started := time.Now()
	r := &run{
		Drainer: d, req: e.req, log: log,
		report: func(reason string, blocked, notify bool) { d.progress(e, reason, blocked, notify) },
	}
	err := recoverPanic(log, func() error { return r.drain(ctx) })
	if ctx.Err() != nil {
		return // shut down, forgotten, or replaced by a forced one
	}
	took := time.Since(started)
	d.metrics.finished(&e.req, took)
	if err != nil {
		log.Info("drain failed", "err", err.Error(), "took", took.String())
	} else {
		log.Info("drain succeeded", "took", took.String())
	}
	d.mu.Lock()
	current := d.drains[e.req.UID] == e
	e.state = State{Phase: Done, Forced: e.req.Force, Err: err, Ended: time.Now(), Took: took}
	d.mu.Unlock()
	if current {
		d.notify(e.req.Machine)
	}
}

// progress stores what a drain waits for, and notifies if wanted.
func (d *Drainer) progress(e *entry, reason string, blocked, notify bool) {
	d.mu.Lock()
	e.state.Reason, e.state.Blocked = reason, blocked
	current := d.drains[e.req.UID] == e
	d.mu.Unlock()
	if notify && current {
		d.notify(e.req.Machine)
	}
}

// acquireSlot waits until one more request may be sent. The caller must release the slot.
func (d *Drainer) acquireSlot(ctx context.Context) (release func(), err error) {
	select {
	case d.slots <- struct{}{}:
		return func() { <-d.slots }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (d *Drainer) log(req *Request) logr.Logger {
	return logr.FromContextOrDiscard(d.ctx).WithValues("machine", req.Machine, "node", req.Node.Name, "forced", req.Force)
}

// recoverPanic turns a panic of f into an error: it must not end the manager with all other
// drains.
func recoverPanic(log logr.Logger, f func() error) (err error) {
	defer func() {
		if cause := recover(); cause != nil {
			err = fmt.Errorf("panic: %v", cause)
			log.Error(err, "drain panicked", "stack", string(debug.Stack()))
		}
	}()

	return f()
}
